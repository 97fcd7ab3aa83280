// down.cpp: sums of the rows of down_t. Neurons are dealt out to groups that depend on the matrix alone, and
// every sum of a group is one chain in the order of its neurons. So a token's bits depend neither on the
// number of threads, nor on the other tokens, nor on silent neurons having been computed.
#include "ffn.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace pi {
namespace {

// A group is worth a call of its own when a tenth of it fires (docs/LOG.md).
constexpr int64_t group_bytes = 1024 * 1024;
constexpr int64_t max_groups = 16;
constexpr int64_t group_block = 32; // dealt out in turn: in hot-first order neighbours fire together
constexpr int64_t min_columns = 256;

class DownSum {
  public:
    DownSum(CpuStream &stream, const FfnArgs &args, uint32_t n_tokens, const Fired &fired)
        : stream_(stream), matrix_(args.layer->down_t),
          rows_(matrix_.rows(args.neuron_begin, args.neuron_end)), n_tokens_(n_tokens), fired_(fired),
          n_embd_(rows_.n_cols), n_groups_(count_groups()),
          capacity_((rows_.n_rows / group_block / n_groups_ + 1) * group_block) {
        const auto lists = static_cast<uint64_t>(n_tokens_ * n_groups_);
        index_ = stream.group_index.as<int32_t>(lists * static_cast<uint64_t>(capacity_));
        coef_ = stream.group_coef.floats(lists * static_cast<uint64_t>(capacity_));
        sizes_ = stream.group_size.as<int64_t>(lists);
    }

    void run(float *out) {
        partials_ = n_groups_ == 1
                        ? out
                        : stream_.partials.floats(static_cast<uint64_t>(n_groups_ * n_tokens_ * n_embd_));
        stream_.pool.run(n_tokens_, [&](int64_t token, uint32_t) { deal_out(token); });
        const int64_t width = column_width();
        const int64_t n_splits = (n_embd_ + width - 1) / width;
        stream_.pool.run(n_groups_ * n_splits, [&](int64_t item, uint32_t) {
            const int64_t begin = item % n_splits * width;
            sum_group(item / n_splits, begin, std::min(width, n_embd_ - begin));
        });
        if (n_groups_ > 1)
            stream_.pool.run(n_tokens_, [&](int64_t token, uint32_t) { add_groups(token, out); });
    }

  private:
    int64_t count_groups() const {
        const auto most = static_cast<uint64_t>(rows_.n_rows * rows_.row_bytes / group_bytes);
        return std::clamp(static_cast<int64_t>(std::bit_floor(most)), int64_t{1}, max_groups);
    }

    // Where the groups are fewer than the threads could use, they are split by columns.
    int64_t column_width() const {
        const int64_t block = std::max(group_block, static_cast<int64_t>(matrix_.type->block_elements));
        const auto n_threads = static_cast<int64_t>(stream_.pool.n_threads());
        const int64_t useful = n_threads == 1 ? 1 : (2 * n_threads + n_groups_ - 1) / n_groups_;
        const int64_t n_splits = std::clamp(n_embd_ / min_columns, int64_t{1}, useful);
        return ((n_embd_ + n_splits - 1) / n_splits + block - 1) / block * block;
    }

    int64_t list(int64_t token, int64_t group) const { return token * n_groups_ + group; }
    float *partial(int64_t token, int64_t group) const {
        return partials_ + (group * n_tokens_ + token) * n_embd_;
    }

    void deal_out(int64_t token) {
        int64_t sizes[max_groups] = {};
        const int32_t *index = fired_.index + token * fired_.stride;
        const float *coef = fired_.coef + token * fired_.stride;
        int32_t *to_index = index_ + list(token, 0) * capacity_;
        float *to_coef = coef_ + list(token, 0) * capacity_;
        for (int64_t i = 0; i < fired_.n[token]; ++i) {
            const int64_t group = index[i] / group_block & (n_groups_ - 1);
            const int64_t at = group * capacity_ + sizes[group]++;
            to_index[at] = index[i];
            to_coef[at] = coef[i];
        }
        std::copy_n(sizes, n_groups_, sizes_ + list(token, 0));
    }

    // Columns [begin, begin + n) of a group's sums. Tokens take turns on rows few enough to stay in the
    // cache.
    void sum_group(int64_t group, int64_t begin, int64_t n) const {
        for (int64_t token = 0; token < n_tokens_; ++token)
            std::fill_n(partial(token, group) + begin, n, 0.0f);
        const int64_t segment_bytes = rows_.row_bytes * n / n_embd_;
        const int64_t turn_rows = n_tokens_ == 1 ? rows_.n_rows : shared_bytes / segment_bytes;
        const int64_t turn = (turn_rows / group_block + 1) * group_block * n_groups_;
        int64_t next[max_union_tokens] = {};
        for (int64_t end = turn; end < rows_.n_rows + turn; end += turn) {
            for (int64_t token = 0; token < n_tokens_; ++token)
                next[token] = add_rows(token, group, next[token], end, begin, n);
        }
    }

    // Adds the rows from the list's place `first` on that belong to neurons below `end`; returns the next
    // place.
    int64_t add_rows(int64_t token, int64_t group, int64_t first, int64_t end, int64_t begin,
                     int64_t n) const {
        const int32_t *index = index_ + list(token, group) * capacity_;
        const float *coef = coef_ + list(token, group) * capacity_;
        const int64_t size = sizes_[list(token, group)];
        const int64_t last =
            end >= rows_.n_rows ? size : std::lower_bound(index + first, index + size, end) - index;
        if (last > first) {
            pi_rows rows = rows_;
            rows.index = index + first;
            rows.n_rows = last - first;
            stream_.kernels.type[matrix_.type->kernel_index].axpy(&rows, coef + first, begin, n,
                                                                  partial(token, group) + begin);
        }
        return last;
    }

    void add_groups(int64_t token, float *out) const {
        float *sum = out + token * n_embd_;
        std::copy_n(partial(token, 0), n_embd_, sum);
        for (int64_t group = 1; group < n_groups_; ++group)
            stream_.kernels.add(partial(token, group), n_embd_, sum);
    }

    CpuStream &stream_;
    const Matrix &matrix_;
    const pi_rows rows_; // of the neurons' range
    const int64_t n_tokens_;
    const Fired &fired_;
    const int64_t n_embd_;
    const int64_t n_groups_;
    const int64_t capacity_; // neurons of a group
    int32_t *index_;         // [n_tokens, n_groups, capacity]
    float *coef_;
    int64_t *sizes_;            // [n_tokens, n_groups]
    float *partials_ = nullptr; // [n_groups, n_tokens, n_embd]
};

} // namespace

void accumulate_down(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens,
                     const Fired &fired) {
    DownSum(stream, args, n_tokens, fired).run(args.out + uint64_t{token_begin} * args.config->n_embd);
}

} // namespace pi
