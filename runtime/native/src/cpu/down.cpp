// down.cpp: sums of the rows of down_t. A token's fired neurons are cut into as many equal parts as the size
// of the matrix says, and every sum of a part is one chain in the order of its neurons. So a token's bits
// depend neither on the number of threads, nor on the other tokens, nor on silent neurons having been
// computed.
#include "ffn.h"

#include <algorithm>
#include <bit>

namespace pi {
namespace {

// A part is worth a call of its own when a tenth of the neurons fires (docs/LOG.md).
constexpr int64_t part_bytes = 1024 * 1024; // of the matrix
constexpr int64_t max_parts = 16;
constexpr int64_t min_columns = 256;

class DownSum {
  public:
    DownSum(CpuStream &stream, const FfnArgs &args, uint32_t n_tokens, const Fired &fired)
        : stream_(stream), matrix_(args.layer->down_t),
          rows_(matrix_.rows(args.neuron_begin, args.neuron_end)), n_tokens_(n_tokens), fired_(fired),
          n_embd_(rows_.n_cols), n_parts_(count_parts()) {}

    void run(const FfnArgs &args, uint32_t token_begin) {
        float *out = args.out + uint64_t{token_begin} * args.config->n_embd;
        partials_ = n_parts_ == 1
                        ? out
                        : stream_.partials.floats(static_cast<uint64_t>(n_parts_ * n_tokens_ * n_embd_));
        const int64_t width = column_width();
        const int64_t n_splits = (n_embd_ + width - 1) / width;
        stream_.pool.run(n_parts_ * n_splits, [&](int64_t item, uint32_t) {
            const int64_t begin = item % n_splits * width;
            sum_part(item / n_splits, begin, std::min(width, n_embd_ - begin));
        });
        if (n_parts_ == 1)
            return deliver(stream_, args, token_begin, static_cast<uint32_t>(n_tokens_));
        for_columns(stream_, static_cast<uint32_t>(n_tokens_), static_cast<uint32_t>(n_embd_),
                    [&](uint32_t token, uint32_t begin, uint32_t n) {
                        add_parts(token, begin, n, out + token * n_embd_ + begin);
                        if (args.deliver != nullptr)
                            (*args.deliver)(token_begin + token, begin, begin + n);
                    });
    }

  private:
    int64_t count_parts() const {
        const auto most = static_cast<uint64_t>(rows_.n_rows * rows_.row_bytes / part_bytes);
        return std::clamp(static_cast<int64_t>(std::bit_floor(most)), int64_t{1}, max_parts);
    }

    // Where the parts are fewer than the threads could use, they are split by columns.
    int64_t column_width() const {
        const int64_t block = std::max<int64_t>(PI_QK, matrix_.type->block_elements);
        const auto n_threads = static_cast<int64_t>(stream_.pool.n_threads());
        const int64_t useful = n_threads == 1 ? 1 : (2 * n_threads + n_parts_ - 1) / n_parts_;
        const int64_t n_splits = std::clamp(n_embd_ / min_columns, int64_t{1}, useful);
        return ((n_embd_ + n_splits - 1) / n_splits + block - 1) / block * block;
    }

    // The token's first fired neuron of a part, as a place in its list.
    int64_t part_begin(int64_t token, int64_t part) const { return fired_.n[token] * part / n_parts_; }
    const int32_t *index(int64_t token) const { return fired_.index + token * fired_.stride; }
    float *partial(int64_t token, int64_t part) const {
        return partials_ + (part * n_tokens_ + token) * n_embd_;
    }

    // Columns [begin, begin + n) of a part's sums. Tokens take turns on rows few enough to stay in the cache.
    void sum_part(int64_t part, int64_t begin, int64_t n) const {
        int64_t next[max_union_tokens], first = rows_.n_rows, last = 0;
        for (int64_t token = 0; token < n_tokens_; ++token) {
            std::fill_n(partial(token, part) + begin, n, 0.0f);
            next[token] = part_begin(token, part);
            const int64_t end = part_begin(token, part + 1);
            if (next[token] < end) {
                first = std::min<int64_t>(first, index(token)[next[token]]);
                last = std::max<int64_t>(last, index(token)[end - 1]);
            }
        }
        const int64_t turn =
            n_tokens_ == 1 ? rows_.n_rows : shared_bytes / (rows_.row_bytes * n / n_embd_) + 1;
        for (int64_t end = first + turn; end <= last + turn; end += turn) {
            for (int64_t token = 0; token < n_tokens_; ++token)
                next[token] = add_rows(token, part, next[token], end, begin, n);
        }
    }

    // Adds the rows from the list's place `first` on that belong to the part and to neurons below `end`;
    // returns the next place.
    int64_t add_rows(int64_t token, int64_t part, int64_t first, int64_t end, int64_t begin,
                     int64_t n) const {
        const int32_t *neurons = index(token);
        const int64_t part_end = part_begin(token, part + 1);
        const int64_t last = std::lower_bound(neurons + first, neurons + part_end, end) - neurons;
        if (last == first)
            return first;
        pi_rows rows = rows_;
        rows.index = neurons + first;
        rows.n_rows = last - first;
        if (n_tokens_ == 1 && stream_.pool.n_threads() == 1) { // the next part is this thread's
            rows.ahead = neurons + last;
            rows.n_ahead = fired_.n[token] - last;
        }
        stream_.kernels.type[matrix_.type->kernel_index].axpy(
            &rows, fired_.coef + token * fired_.stride + first, begin, n, partial(token, part) + begin);
        return last;
    }

    void add_parts(int64_t token, int64_t begin, int64_t n, float *sum) const {
        std::copy_n(partial(token, 0) + begin, n, sum);
        for (int64_t part = 1; part < n_parts_; ++part)
            stream_.kernels.add(partial(token, part) + begin, n, sum);
    }

    CpuStream &stream_;
    const Matrix &matrix_;
    const pi_rows rows_; // of the neurons' range
    const int64_t n_tokens_;
    const Fired &fired_;
    const int64_t n_embd_;
    const int64_t n_parts_;
    float *partials_ = nullptr; // [n_parts, n_tokens, n_embd]
};

} // namespace

void accumulate_down(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens,
                     const Fired &fired) {
    DownSum(stream, args, n_tokens, fired).run(args, token_begin);
}

} // namespace pi
