// ffn.cpp: the feed-forward block on the CPU. One token at a time the gate decides which rows of up and down
// are read; larger steps compute every neuron, since together their tokens touch nearly all.
#include "stream.h"

#include "../status.h"

#include <algorithm>
#include <cstring>

namespace pi {
namespace {

// down_t rows are summed in this many groups, blocks of 32 neurons dealt out in turn, so that the sums are
// the same for every number of threads and whichever neurons fire. (hot-first order makes neighbours fire
// together.)
constexpr int64_t n_groups = 16;
constexpr int64_t group_block = 32;

// out [n] = act(gate) * up; returns how many neurons fired (all, where the activation is never silent).
int64_t activate(const CpuStream &stream, const ModelConfig &config, const float *gate, const float *up,
                 int64_t n, float *out) {
    if (config.activation == Activation::relu)
        return stream.kernels.gated_relu(gate, up, n, config.activation_threshold, out);
    stream.kernels.gated_silu(gate, up, n, out);
    return n;
}

// Sets the bit of every neuron whose activation is not 0. index null: activation i belongs to neuron i.
void record_fired(const FfnArgs &args, uint32_t token, const int32_t *index, const float *activations,
                  int64_t n) {
    if (args.fired == nullptr)
        return;
    uint64_t *words = args.fired + token * args.fired_stride;
    for (int64_t i = 0; i < n; ++i) {
        if (activations[i] == 0)
            continue;
        const auto neuron = args.neuron_begin + static_cast<uint64_t>(index == nullptr ? i : index[i]);
        words[neuron / 64] |= uint64_t{1} << (neuron % 64);
    }
}

// Fired neurons with their activations, in ascending order.
struct Fired {
    int32_t *index; // relative to neuron_begin
    float *coef;
    int64_t n;
};

class SparseFfn {
  public:
    SparseFfn(CpuStream &stream, const FfnArgs &args)
        : stream_(stream), args_(args), layer_(*args.layer), n_(args.neuron_end - args.neuron_begin),
          group_capacity_((n_ / group_block / n_groups + 1) * group_block) {
        fired_ = {stream.fired_index.as<int32_t>(static_cast<uint64_t>(n_)),
                  stream.fired_coef.floats(static_cast<uint64_t>(n_)), 0};
        gate_ = stream.gate.floats(static_cast<uint64_t>(n_));
        up_ = stream.up.floats(static_cast<uint64_t>(n_));
        group_index_ = stream.group_index.as<int32_t>(static_cast<uint64_t>(group_capacity_ * n_groups));
        group_coef_ = stream.group_coef.floats(static_cast<uint64_t>(group_capacity_ * n_groups));
    }

    void run(uint32_t token) {
        const uint32_t mode = args_.modes[token];
        const float *normed = args_.normed + uint64_t{token} * args_.config->n_embd;
        args_.counts->total += static_cast<uint64_t>(n_);
        if (mode == PI_FFN_DENSE) {
            fire_all(normed);
            args_.counts->guessed += static_cast<uint64_t>(n_);
        } else {
            const int64_t n_candidates = mode == PI_FFN_PREDICTED ? predict(token) : n_;
            fire_candidates(normed, mode == PI_FFN_PREDICTED ? candidates_ : nullptr, n_candidates);
            args_.counts->guessed += static_cast<uint64_t>(n_candidates);
        }
        args_.counts->active += static_cast<uint64_t>(fired_.n);
        record_fired(args_, token, fired_.index, fired_.coef, fired_.n);
        accumulate(args_.out + uint64_t{token} * args_.config->n_embd);
    }

  private:
    Product neurons(const Matrix &matrix, float *out) const {
        return {&matrix, args_.neuron_begin, args_.neuron_end, nullptr, out};
    }

    // Every neuron counts as fired, silent ones with activation 0.
    void fire_all(const float *normed) {
        const Product products[] = {neurons(layer_.gate, gate_), neurons(layer_.up, up_)};
        cpu_matmul(stream_, products, normed, nullptr, 1);
        activate(stream_, *args_.config, gate_, up_, n_, fired_.coef);
        for (int64_t i = 0; i < n_; ++i)
            fired_.index[i] = static_cast<int32_t>(i);
        fired_.n = n_;
    }

    // Fills candidates_ with the neurons whose logit reaches the threshold; returns how many.
    int64_t predict(uint32_t token) {
        const float *residual = args_.residual + uint64_t{token} * args_.config->n_embd;
        float *hidden = stream_.predictor_hidden.floats(layer_.predictor_fc1.n_rows);
        float *logits = stream_.predictor_logits.floats(static_cast<uint64_t>(n_));
        const Product first = whole(layer_.predictor_fc1, nullptr, hidden);
        cpu_matmul(stream_, {&first, 1}, residual, nullptr, 1);
        for (uint64_t i = 0; i < layer_.predictor_fc1.n_rows; ++i)
            hidden[i] = std::max(hidden[i], 0.0f);
        const Product second = neurons(layer_.predictor_fc2, logits);
        cpu_matmul(stream_, {&second, 1}, hidden, nullptr, 1);
        candidates_ = stream_.predicted.as<int32_t>(static_cast<uint64_t>(n_));
        int64_t n = 0;
        for (int64_t i = 0; i < n_; ++i) {
            candidates_[n] = static_cast<int32_t>(i);
            n += logits[i] >= args_.sparse_threshold ? 1 : 0;
        }
        return n;
    }

    // Gates of the candidates (null: all), then up where the gate is open, chunk by chunk.
    void fire_candidates(const float *normed, const int32_t *candidates, int64_t n_candidates) {
        const uint64_t n_embd = layer_.gate.n_cols;
        if (uses_int8(stream_, layer_.gate, 1) || uses_int8(stream_, layer_.up, 1))
            quantise_input(stream_, normed, 1, n_embd);
        const auto row_bytes = static_cast<int64_t>(layer_.gate.row_bytes);
        const int64_t step = rows_per_chunk(stream_, n_candidates * row_bytes, row_bytes);
        const int64_t n_chunks = (n_candidates + step - 1) / step;
        auto *counts = stream_.fired_count.as<int64_t>(static_cast<uint64_t>(n_chunks));
        stream_.pool.run(n_chunks, [&](int64_t chunk, uint32_t) {
            const int64_t begin = chunk * step;
            counts[chunk] = fire_chunk(normed, candidates, begin, std::min(step, n_candidates - begin));
        });
        fired_.n = 0;
        for (int64_t chunk = 0; chunk < n_chunks; ++chunk) {
            const auto n = static_cast<size_t>(counts[chunk]);
            std::memmove(fired_.index + fired_.n, fired_.index + chunk * step, n * sizeof(int32_t));
            std::memmove(fired_.coef + fired_.n, fired_.coef + chunk * step, n * sizeof(float));
            fired_.n += counts[chunk];
        }
    }

    void dot(const Matrix &matrix, const pi_rows &rows, const float *x, float *out) const {
        const pi_type_kernels &kernels = stream_.kernels.type[matrix.type->kernel_index];
        if (uses_int8(stream_, matrix, 1)) {
            kernels.dot_q8(&rows, stream_.quantised.tokens.data(), out);
        } else {
            kernels.dot_f32(&rows, x, out);
        }
    }

    // Candidates [begin, begin + n); what fires is left at the chunk's own place. Returns how many fired.
    int64_t fire_chunk(const float *normed, const int32_t *candidates, int64_t begin, int64_t n) const {
        pi_rows rows = layer_.gate.rows(args_.neuron_begin, args_.neuron_end);
        if (candidates == nullptr) {
            rows = layer_.gate.rows(args_.neuron_begin + static_cast<uint64_t>(begin),
                                    args_.neuron_begin + static_cast<uint64_t>(begin + n));
        } else {
            rows.index = candidates + begin;
            rows.n_rows = n;
        }
        float *gate = gate_ + begin;
        dot(layer_.gate, rows, normed, gate);

        int32_t *index = fired_.index + begin;
        const float threshold = args_.config->activation_threshold;
        int64_t n_fired = 0;
        for (int64_t i = 0; i < n; ++i) {
            if (!(gate[i] > threshold))
                continue;
            index[n_fired] = candidates == nullptr ? static_cast<int32_t>(begin + i) : candidates[begin + i];
            gate[n_fired++] = gate[i];
        }
        rows = layer_.up.rows(args_.neuron_begin, args_.neuron_end);
        rows.index = index;
        rows.n_rows = n_fired;
        dot(layer_.up, rows, normed, up_ + begin);
        for (int64_t i = 0; i < n_fired; ++i)
            fired_.coef[begin + i] = gate[i] * up_[begin + i];
        return n_fired;
    }

    // out [n_embd] = sum over the fired neurons of coef * row of down_t.
    void accumulate(float *out) {
        int64_t sizes[n_groups] = {};
        for (int64_t i = 0; i < fired_.n; ++i) {
            const int64_t group = fired_.index[i] / group_block % n_groups;
            const int64_t at = group * group_capacity_ + sizes[group]++;
            group_index_[at] = fired_.index[i];
            group_coef_[at] = fired_.coef[i];
        }
        const auto n_embd = static_cast<int64_t>(layer_.down_t.n_cols);
        float *partials = stream_.partials.floats(static_cast<uint64_t>(n_groups * n_embd));
        const pi_type_kernels &kernels = stream_.kernels.type[layer_.down_t.type->kernel_index];
        stream_.pool.run(n_groups, [&](int64_t group, uint32_t) {
            float *sum = partials + group * n_embd;
            std::fill_n(sum, n_embd, 0.0f);
            pi_rows rows = layer_.down_t.rows(args_.neuron_begin, args_.neuron_end);
            rows.index = group_index_ + group * group_capacity_;
            rows.n_rows = sizes[group];
            kernels.axpy(&rows, group_coef_ + group * group_capacity_, 0, n_embd, sum);
        });
        std::copy_n(partials, n_embd, out);
        for (int64_t group = 1; group < n_groups; ++group)
            stream_.kernels.add(partials + group * n_embd, n_embd, out);
    }

    CpuStream &stream_;
    const FfnArgs &args_;
    const LayerWeights &layer_;
    const int64_t n_;
    const int64_t group_capacity_;
    Fired fired_{};
    float *gate_;
    float *up_;
    int32_t *candidates_ = nullptr;
    int32_t *group_index_;
    float *group_coef_;
};

// gate [n_tokens, n_neurons] becomes act(gate) * up; counts and records what fired.
void activate_tokens(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens,
                     float *gate, const float *up) {
    const auto n_neurons = static_cast<int64_t>(args.neuron_end - args.neuron_begin);
    std::vector<int64_t> n_fired(n_tokens);
    stream.pool.run(n_tokens, [&](int64_t i, uint32_t) {
        float *activations = gate + i * n_neurons;
        n_fired[static_cast<size_t>(i)] =
            activate(stream, *args.config, activations, up + i * n_neurons, n_neurons, activations);
        record_fired(args, token_begin + static_cast<uint32_t>(i), nullptr, activations, n_neurons);
    });
    for (uint32_t i = 0; i < n_tokens; ++i) {
        const bool dense = args.modes[token_begin + i] == PI_FFN_DENSE;
        args.counts->active += static_cast<uint64_t>(dense ? n_neurons : n_fired[i]);
    }
    args.counts->total += static_cast<uint64_t>(n_neurons) * n_tokens;
    args.counts->guessed += static_cast<uint64_t>(n_neurons) * n_tokens;
}

// Every neuron of every token of the range: the dense block, in either layout.
void run_dense(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens) {
    const LayerWeights &layer = *args.layer;
    const uint64_t n_neurons = args.neuron_end - args.neuron_begin;
    const uint64_t n_embd = args.config->n_embd;
    float *gate = stream.gate.floats(n_tokens * n_neurons);
    float *up = stream.up.floats(n_tokens * n_neurons);
    const Product products[] = {{&layer.gate, args.neuron_begin, args.neuron_end, nullptr, gate},
                                {&layer.up, args.neuron_begin, args.neuron_end, nullptr, up}};
    const uint32_t *positions = args.positions + token_begin;
    cpu_matmul(stream, products, args.normed + token_begin * n_embd, positions, n_tokens);
    activate_tokens(stream, args, token_begin, n_tokens, gate, up);

    float *out = args.out + token_begin * n_embd;
    if (args.config->sparse_layout) {
        matmul_transposed(stream, layer.down_t, args.neuron_begin, args.neuron_end, gate, n_tokens, out);
    } else {
        const Product down = whole(layer.down, nullptr, out);
        cpu_matmul(stream, {&down, 1}, gate, positions, n_tokens);
    }
}

} // namespace

void cpu_ffn(CpuStream &stream, const FfnArgs &args) {
    if (!args.config->sparse_layout) {
        if (args.neuron_begin != 0 || args.neuron_end != args.config->n_ff)
            throw Error(PI_FAILURE, "a plain-layout FFN cannot be split by neurons",
                        "convert to the sparse layout");
        return run_dense(stream, args, 0, args.n_tokens);
    }
    // Runs of tokens: masked ones one by one, the others together when there are enough of them.
    for (uint32_t begin = 0, end = 0; begin < args.n_tokens; begin = end) {
        const bool masked = args.modes[begin] == PI_FFN_PREDICTED;
        while (end < args.n_tokens && (args.modes[end] == PI_FFN_PREDICTED) == masked)
            ++end;
        if (!masked && end - begin > gemv_tokens) {
            run_dense(stream, args, begin, end - begin);
            continue;
        }
        SparseFfn one(stream, args);
        for (uint32_t token = begin; token < end; ++token)
            one.run(token);
    }
}

} // namespace pi
