// sparse_ffn.cpp: exact and predicted tokens, up to max_union_tokens of them together. The threads take
// ranges of neurons. Of a range every token multiplies the gates that its mask lets through, and the rows of
// up whose gate is open; the first token brings a row into the cache, the others find it there. A token's
// bits are those that it has alone.
#include "ffn.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace pi {
namespace {

constexpr int64_t block = 32;       // neurons: ranges are made of these
constexpr uint64_t line_bytes = 64; // of a cache

class SparseFfn {
  public:
    SparseFfn(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens)
        : stream_(stream), args_(args), layer_(*args.layer), first_(token_begin), n_tokens_(n_tokens),
          n_(args.neuron_end - args.neuron_begin), n_blocks_((n_ + block - 1) / block) {
        const auto n_all = static_cast<uint64_t>(n_ * n_tokens);
        fired_ = {stream.fired_index.as<int32_t>(n_all), stream.fired_coef.floats(n_all),
                  stream.fired_count.as<int64_t>(n_tokens), n_};
        gate_ = stream.gate.floats(n_all);
        up_ = stream.up.floats(n_all);
        candidates_ = stream.predicted.as<int32_t>(n_all);
        starts_ = stream.block_starts.as<int32_t>(static_cast<uint64_t>((n_blocks_ + 1) * n_tokens));
    }

    void run() {
        if (args_.mask == nullptr)
            predict();
        prepare();
        if (args_.mask != nullptr)
            take_masks();
        split();
        fire();
        finish();
        accumulate_down(stream_, args_, first_, n_tokens_, fired_);
    }

  private:
    bool masked(uint32_t token) const { return args_.modes[first_ + token] == PI_FFN_PREDICTED; }
    bool dense(uint32_t token) const { return args_.modes[first_ + token] == PI_FFN_DENSE; }
    // Counts of a range, in cache lines of its own.
    int64_t range_stride() const {
        constexpr int64_t line = line_bytes / sizeof(int64_t);
        return (int64_t{n_tokens_} + line - 1) / line * line;
    }
    // Candidates of a token before a block of neurons.
    int64_t start(uint32_t token, int64_t at) const {
        return masked(token) ? starts_[token * (n_blocks_ + 1) + at] : std::min(at * block, n_);
    }

    // The tokens as the products read them. While masks are on their way every thread's core fetches them.
    void prepare() const {
        const uint64_t n_embd = layer_.gate.n_cols, n = n_tokens_ * n_embd;
        const float *normed = args_.normed + first_ * n_embd;
        const bool int8 = uses_int8(stream_, layer_.gate, 1) || uses_int8(stream_, layer_.up, 1);
        if (int8)
            quantise_input(stream_, normed, n_tokens_, n_embd);
        if (args_.await_masks == nullptr)
            return;
        stream_.pool.run(stream_.pool.n_threads(), [&](int64_t, uint32_t) {
            if (!int8)
                return fetch(normed, n * sizeof(float));
            const pi_q8_vector &first = stream_.quantised.tokens[0];
            fetch(first.q, n);
            fetch(first.d, n / PI_QK * sizeof(float));
            fetch(first.s, n / PI_QK * sizeof(float));
        });
    }

    static void fetch(const void *data, uint64_t n_bytes) {
        for (uint64_t i = 0; i < n_bytes; i += line_bytes)
            __builtin_prefetch(static_cast<const uint8_t *>(data) + i);
    }

    // Candidates of the masked tokens, by given masks.
    void take_masks() {
        if (args_.await_masks != nullptr)
            (*args_.await_masks)(first_, first_ + n_tokens_);
        stream_.pool.run(n_tokens_, [&](int64_t i, uint32_t) {
            if (masked(static_cast<uint32_t>(i)))
                list_masked(static_cast<uint32_t>(i));
        });
    }

    // The same by the predictor, run by run of them.
    void predict() {
        for (uint32_t begin = 0, end = 0; begin < n_tokens_; begin = end) {
            end = begin + 1;
            while (masked(begin) && end < n_tokens_ && masked(end))
                ++end;
            if (masked(begin))
                predict(begin, end - begin);
        }
    }

    void predict(uint32_t begin, uint32_t n_tokens) {
        const uint64_t rank = layer_.predictor_fc1.n_rows;
        const float *residual = args_.residual + uint64_t{first_ + begin} * args_.config->n_embd;
        float *hidden = stream_.predictor_hidden.floats(rank * n_tokens);
        float *logits = stream_.predictor_logits.floats(static_cast<uint64_t>(n_) * n_tokens);
        const Product first = whole(layer_.predictor_fc1, nullptr, hidden);
        cpu_matmul(stream_, {&first, 1}, residual, nullptr, n_tokens);
        for (uint64_t i = 0; i < rank * n_tokens; ++i)
            hidden[i] = std::max(hidden[i], 0.0f);
        const Product second{&layer_.predictor_fc2, args_.neuron_begin, args_.neuron_end, nullptr, logits};
        cpu_matmul(stream_, {&second, 1}, hidden, nullptr, n_tokens);
        stream_.pool.run(n_tokens, [&](int64_t i, uint32_t) {
            const float *of_token = logits + i * n_;
            list_candidates(of_token, begin + static_cast<uint32_t>(i));
        });
    }

    // The neurons of a given mask, whose bits beyond the last neuron are 0.
    void list_masked(uint32_t token) const {
        static_assert(block == 32);
        const uint64_t *mask = args_.mask + (first_ + token) * args_.mask_stride;
        int32_t *candidates = candidates_ + token * n_;
        int32_t *starts = starts_ + token * (n_blocks_ + 1);
        int32_t n = 0;
        for (int64_t at = 0; at < n_blocks_; ++at) {
            starts[at] = n;
            for (auto bits = static_cast<uint32_t>(mask[at / 2] >> (at % 2 * block)); bits != 0;
                 bits &= bits - 1)
                candidates[n++] = static_cast<int32_t>(at * block) + std::countr_zero(bits);
        }
        starts[n_blocks_] = n;
    }

    // The neurons whose logit reaches the threshold.
    void list_candidates(const float *logits, uint32_t token) const {
        int32_t *candidates = candidates_ + token * n_;
        int32_t *starts = starts_ + token * (n_blocks_ + 1);
        int32_t n = 0;
        for (int64_t at = 0; at < n_blocks_; ++at) {
            starts[at] = n;
            for (int64_t i = at * block; i < std::min((at + 1) * block, n_); ++i) {
                candidates[n] = static_cast<int32_t>(i); // no branch: which are let through cannot be guessed
                n += logits[i] >= args_.sparse_threshold ? 1 : 0;
            }
        }
        starts[n_blocks_] = n;
    }

    // Rows of a block that some token may read, at most.
    int64_t rows_of_block(int64_t at) const {
        int64_t n = 0;
        for (uint32_t token = 0; token < n_tokens_ && n < block; ++token)
            n += start(token, at + 1) - start(token, at);
        return std::min(n, block);
    }

    // How many ranges: as many for every thread, since the last of them are waited for.
    int64_t count_ranges(int64_t n_rows) const {
        const auto row_bytes = static_cast<int64_t>(layer_.gate.row_bytes);
        int64_t limit = rows_per_chunk(stream_, n_rows * row_bytes, row_bytes);
        if (n_tokens_ > 1)
            limit = std::min(limit, std::max(shared_bytes / row_bytes, block));
        const auto n_threads = static_cast<int64_t>(stream_.pool.n_threads());
        return (std::max<int64_t>(n_rows / limit, 1) + n_threads - 1) / n_threads * n_threads;
    }

    // Ranges of blocks with about as many rows to read.
    void split() {
        int64_t n_rows = 0;
        for (int64_t at = 0; at < n_blocks_; ++at)
            n_rows += rows_of_block(at);
        const int64_t n_wanted = count_ranges(n_rows);
        ranges_ = stream_.ranges.as<int64_t>(static_cast<uint64_t>(n_blocks_ + 1));
        ranges_[0] = n_ranges_ = 0;
        for (int64_t at = 0, seen = 0, next = 1; at < n_blocks_; ++at) {
            seen += rows_of_block(at);
            if (seen * n_wanted < std::max<int64_t>(n_rows, 1) * next && at + 1 < n_blocks_)
                continue;
            ranges_[++n_ranges_] = at + 1;
            next = seen * n_wanted / std::max<int64_t>(n_rows, 1) + 1;
        }
        range_fired_ = stream_.range_fired.as<int64_t>(static_cast<uint64_t>(n_ranges_ * range_stride()));
    }

    void fire() {
        stream_.pool.run(n_ranges_, [&](int64_t range, uint32_t) {
            multiply_gates(range);
            for (uint32_t token = 0; token < n_tokens_; ++token)
                open_gates(token, range);
            for (uint32_t token = 0; token < n_tokens_; ++token)
                multiply_up(token, range);
        });
    }

    void dot(const Matrix &matrix, const pi_rows &rows, uint32_t token, float *out) const {
        const pi_type_kernels &kernels = stream_.kernels.type[matrix.type->kernel_index];
        if (uses_int8(stream_, matrix, 1) && !is_precise(args_.positions, first_ + token)) {
            kernels.dot_q8(&rows, &stream_.quantised.tokens[token], out);
        } else {
            kernels.dot_f32(&rows, args_.normed + (first_ + token) * matrix.n_cols, out);
        }
    }

    // Gates of a range: of every token those of its candidates.
    void multiply_gates(int64_t range) const {
        for (uint32_t token = 0, end = 0; token < n_tokens_; token = end) {
            end = token + 1;
            while (!masked(token) && end < n_tokens_ && !masked(end))
                ++end;
            const int64_t begin = start(token, ranges_[range]), n = start(token, ranges_[range + 1]) - begin;
            const bool all = !masked(token);
            const auto first = args_.neuron_begin + static_cast<uint64_t>(all ? begin : 0);
            pi_rows rows = layer_.gate.rows(first, all ? first + static_cast<uint64_t>(n) : args_.neuron_end);
            if (!all) {
                rows.index = candidates_ + token * n_ + begin;
                rows.n_rows = n;
            }
            multiply(layer_.gate, rows, token, end - token, gate_ + token * n_ + begin);
        }
    }

    // The same rows for every one of some tokens; out [n_tokens, n].
    void multiply(const Matrix &matrix, const pi_rows &rows, uint32_t token, uint32_t n_tokens,
                  float *out) const {
        const auto many_q8 = stream_.kernels.type[matrix.type->kernel_index].many_q8;
        bool together = n_tokens > gemv_tokens && many_q8 != nullptr && uses_int8(stream_, matrix, n_tokens);
        for (uint32_t i = 0; i < n_tokens; ++i)
            together = together && !is_precise(args_.positions, first_ + token + i);
        if (together) {
            many_q8(&rows, &stream_.quantised.tokens[token], n_tokens, out, n_);
        } else {
            for (uint32_t i = 0; i < n_tokens; ++i)
                dot(matrix, rows, token + i, out + i * n_);
        }
    }

    // Leaves the gates that are open, and their neurons, at the range's own place.
    void open_gates(uint32_t token, int64_t range) const {
        const int64_t begin = start(token, ranges_[range]), n = start(token, ranges_[range + 1]) - begin;
        const int32_t *candidates = masked(token) ? candidates_ + token * n_ + begin : nullptr;
        float *gate = gate_ + token * n_ + begin;
        int32_t *index = fired_.index + token * n_ + begin;
        const float threshold = args_.config->activation_threshold;
        int64_t n_fired = 0;
        for (int64_t i = 0; i < n; ++i) {
            index[n_fired] = candidates == nullptr ? static_cast<int32_t>(begin + i) : candidates[i];
            const float value = gate[i];
            gate[n_fired] = value;
            n_fired += value > threshold ? 1 : 0;
        }
        range_fired_[range * range_stride() + token] = n_fired;
    }

    void multiply_up(uint32_t token, int64_t range) const {
        const int64_t begin = start(token, ranges_[range]), end = start(token, ranges_[range + 1]);
        const int64_t at = token * n_ + begin, n_fired = range_fired_[range * range_stride() + token];
        const int32_t *index = fired_.index + at;
        float *up = up_ + at, *coef = fired_.coef + at;
        if (dense(token)) {
            const auto first = args_.neuron_begin + static_cast<uint64_t>(begin);
            dot(layer_.up, layer_.up.rows(first, first + static_cast<uint64_t>(end - begin)), token, up);
            for (int64_t i = 0; i < n_fired; ++i)
                up[i] = up[index[i] - begin];
        } else {
            pi_rows rows = layer_.up.rows(args_.neuron_begin, args_.neuron_end);
            rows.index = index;
            rows.n_rows = n_fired;
            dot(layer_.up, rows, token, up);
        }
        for (int64_t i = 0; i < n_fired; ++i)
            coef[i] = gate_[at + i] * up[i];
    }

    // Moves what fired of a token together, and counts it.
    void finish() {
        stream_.pool.run(n_tokens_, [&](int64_t i, uint32_t) {
            const auto token = static_cast<uint32_t>(i);
            int32_t *index = fired_.index + i * n_;
            float *coef = fired_.coef + i * n_;
            int64_t n = 0;
            for (int64_t range = 0; range < n_ranges_; ++range) {
                const int64_t from = start(token, ranges_[range]);
                const int64_t n_fired = range_fired_[range * range_stride() + token];
                std::memmove(index + n, index + from, static_cast<size_t>(n_fired) * sizeof(int32_t));
                std::memmove(coef + n, coef + from, static_cast<size_t>(n_fired) * sizeof(float));
                n += n_fired;
            }
            fired_.n[i] = n;
            record_fired(args_, first_ + token, index, coef, n);
        });
        for (uint32_t token = 0; token < n_tokens_; ++token) {
            args_.counts->guessed += static_cast<uint64_t>(start(token, n_blocks_));
            args_.counts->active += static_cast<uint64_t>(dense(token) ? n_ : fired_.n[token]);
        }
        args_.counts->total += static_cast<uint64_t>(n_) * n_tokens_;
    }

    CpuStream &stream_;
    const FfnArgs &args_;
    const LayerWeights &layer_;
    const uint32_t first_;
    const uint32_t n_tokens_;
    const int64_t n_;
    const int64_t n_blocks_;
    Fired fired_{};
    float *gate_; // [n_tokens, n]
    float *up_;
    int32_t *candidates_;       // [n_tokens, n] of the masked tokens
    int32_t *starts_;           // [n_tokens, n_blocks + 1] candidates before a block
    int64_t *ranges_ = nullptr; // [n_ranges + 1] in blocks
    int64_t n_ranges_ = 0;
    int64_t *range_fired_ = nullptr; // [n_ranges, range_stride]
};

} // namespace

void run_sparse(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens) {
    SparseFfn(stream, args, token_begin, n_tokens).run();
}

} // namespace pi
