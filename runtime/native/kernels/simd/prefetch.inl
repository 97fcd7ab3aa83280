// prefetch.inl: the rows that a kernel is to read, and fetching them ahead of their use. Memory answers after
// some 100 ns, in which 4 KiB could have come; the processor's own prefetcher starts anew in every row and
// alone reaches a third of the bandwidth (docs/LOG.md).

#pragma once

namespace {

constexpr int64_t group_rows = 4; // rows that go through a loop side by side
constexpr int64_t cache_line = 64;
constexpr int64_t prefetch_bytes = 8192;    // on their way at any time
constexpr int64_t long_call_bytes = 262144; // from which on half as many more pay
constexpr int64_t max_groups_ahead = 16;
constexpr int64_t list_rows = 256; // a multiple of group_rows
constexpr int64_t rows_ahead = group_rows * (max_groups_ahead + 1);

inline const char *row_of(const pi_rows *w, int64_t i) {
    return static_cast<const char *>(w->base) + (w->index ? w->index[i] : i) * w->row_bytes;
}

// While block b of a group is computed, block b + `blocks` of the group `groups` further on is fetched, or
// where the row ends before, the beginning of the group after that. One of the two is 0.
struct Lookahead {
    int64_t groups;
    int64_t blocks;
};

inline Lookahead look_ahead(int64_t n_rows, int64_t n_blocks, int64_t block_bytes) {
    const int64_t row_bytes = n_blocks * block_bytes, group_bytes = group_rows * row_bytes;
    const int64_t distance = n_rows * row_bytes < long_call_bytes ? prefetch_bytes : prefetch_bytes * 3 / 2;
    if (group_bytes > distance)
        return {0, distance / (group_rows * block_bytes)};
    const int64_t groups = group_bytes > 0 ? (distance + group_bytes - 1) / group_bytes : 0;
    return {groups < max_groups_ahead ? groups : max_groups_ahead, 0};
}

// always_inline: GCC takes a function that only prefetches for one without effect and drops the call.
template <typename Type>
[[gnu::always_inline]] inline void prefetch_start(const char *const *rows, int64_t n_rows, int64_t n_blocks,
                                                  Lookahead ahead) {
    const int64_t row_bytes = (ahead.groups > 0 ? n_blocks : ahead.blocks) * Type::block_bytes;
    const int64_t first_rows = group_rows * (ahead.groups > 0 ? ahead.groups : 1);
    for (int64_t r = 0; r < first_rows && r < n_rows; ++r) {
        for (int64_t offset = 0; offset < row_bytes; offset += cache_line)
            __builtin_prefetch(rows[r] + offset);
    }
}

// The cache lines that end in a block or just behind it. Called for every block of a row in turn, it fetches
// each line of the row once; a line left out would cost as much as all of them.
template <typename Type>
[[gnu::always_inline]] inline void prefetch_block(const char *const rows[group_rows], int64_t block) {
    constexpr int64_t blocks_per_line = Type::block_bytes < cache_line ? cache_line / Type::block_bytes : 1;
    if (block % blocks_per_line != 0)
        return;
    for (int64_t r = 0; r < group_rows; ++r) {
        const char *p = rows[r] + block * Type::block_bytes;
        if (block == 0)
            __builtin_prefetch(p);
        for (int64_t offset = 0; offset < Type::block_bytes; offset += cache_line) {
            __builtin_prefetch(p + offset + cache_line - 1);
        }
    }
}

// Calls body(b) for every block of the group rows[0 .. 3] and fetches ahead; the list goes on beyond the
// group.
template <typename Type, typename Body>
[[gnu::always_inline]] inline void for_each_block(const char *const *rows, int64_t n_blocks, Lookahead ahead,
                                                  Body body) {
    int64_t b = 0;
    const char *const *target = rows + group_rows * ahead.groups;
    for (; b < n_blocks - ahead.blocks; ++b) {
        prefetch_block<Type>(target, b + ahead.blocks);
        body(b);
    }
    target += group_rows;
    for (; b < n_blocks; ++b) {
        prefetch_block<Type>(target, b + ahead.blocks - n_blocks);
        body(b);
    }
}

// Rows first .. first + n - 1 of a matrix and, beyond them, what to fetch ahead: the next rows, the last one
// repeated.
inline void list_matrix_rows(const pi_rows *w, int64_t first, int64_t n,
                             const char *rows[list_rows + rows_ahead]) {
    for (int64_t i = 0; i < n + rows_ahead; ++i) {
        rows[i] = row_of(w, first + i < w->n_rows ? first + i : w->n_rows - 1);
    }
}

} // namespace
