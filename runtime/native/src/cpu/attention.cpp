// attention.cpp: attention on the CPU, page by page with an online softmax. A task is a tile of tokens of one
// sequence, one KV head and a span of pages; spans are merged by their log-sum-exp in a fixed order.
#include "stream.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace pi {
namespace {

constexpr uint32_t max_tile_queries = 128; // query rows that share a pass over the pages
constexpr uint32_t query_group = 8; // that kernels take together: tiles are multiples where they can be
constexpr uint32_t span_pages = 16; // of a split long context, for steps of few tokens
constexpr uint32_t split_tokens = gemv_tokens;
constexpr uint32_t rounded_tokens = 16; // steps of more round their factors where that may be

struct Tile {
    uint32_t token_begin;
    uint32_t token_end;
    uint32_t page_begin;
    uint32_t page_end;
    uint32_t partial; // index of the tile's first result row: rows [head][token][group head]
};

// One KV head of a tile.
struct Task {
    const Tile &tile;
    uint32_t kv_head;
};

// Running softmax results of one query row.
struct Partials {
    float *out;  // [n_rows, head_dim]
    float *peak; // [n_rows]
    float *sum;  // [n_rows]
};

uint32_t group_size(const ModelConfig &config) {
    return config.n_heads / config.n_kv_heads;
}

uint32_t tokens_of_tile(uint32_t group) {
    const uint32_t most = std::max(max_tile_queries / group, 1u);
    const uint32_t unit = query_group / std::gcd(query_group, group);
    return most < unit ? most : most / unit * unit;
}

std::vector<Tile> make_tiles(const Step &step, const ModelConfig &config) {
    const uint32_t tile_tokens = tokens_of_tile(group_size(config));
    const bool split = step.n_tokens() <= split_tokens;
    std::vector<Tile> tiles;
    uint32_t partial = 0;
    for (uint32_t begin = 0, end = 0; begin < step.n_tokens(); begin = end) {
        uint32_t first_page = step.first_page(begin);
        uint32_t end_page = 0;
        while (end < step.n_tokens() && end - begin < tile_tokens &&
               step.sequences[end] == step.sequences[begin]) {
            first_page = std::min(first_page, step.first_page(end));
            end_page = std::max(end_page, step.end_page(end));
            ++end;
        }
        const uint32_t span = split ? span_pages : end_page;
        for (uint32_t page = first_page; page < end_page; page += span) {
            tiles.push_back({begin, end, page, std::min(page + span, end_page), partial});
            partial += (end - begin) * config.n_heads;
        }
    }
    return tiles;
}

class Attention {
  public:
    Attention(CpuStream &stream, const AttentionArgs &args)
        : stream_(stream), args_(args), config_(*args.config), step_(*args.step),
          tiles_(make_tiles(step_, config_)), group_(group_size(config_)) {
        const Tile &last = tiles_.back();
        const uint64_t n_rows = last.partial + uint64_t{last.token_end - last.token_begin} * config_.n_heads;
        float *memory = stream.partials.floats(n_rows * (config_.head_dim + 2));
        partials_ = {memory, memory + n_rows * config_.head_dim, memory + n_rows * (config_.head_dim + 1)};
        queries_ = stream.heads.floats(uint64_t{stream.pool.n_threads()} * tile_floats());
        visible_ = stream.visible.as<uint32_t>(uint64_t{stream.pool.n_threads()} * visible_words());
        if (rounds())
            room_ = stream.rounded.as<uint8_t>(stream.pool.n_threads() * room_bytes());
    }

    void run() {
        const int64_t n_tasks = static_cast<int64_t>(tiles_.size()) * config_.n_kv_heads;
        stream_.pool.run(n_tasks, [this, n_tasks](int64_t task, uint32_t thread) {
            const int64_t index = n_tasks - 1 - task; // the longest first
            attend_tile(task_at(index), task_at(std::max<int64_t>(index - stream_.pool.n_threads(), 0)),
                        thread);
        });
        stream_.pool.run(static_cast<int64_t>(tiles_.size()), [this](int64_t tile, uint32_t) {
            const auto first = static_cast<size_t>(tile);
            if (first == 0 || tiles_[first].token_begin != tiles_[first - 1].token_begin)
                merge(first);
        });
    }

  private:
    uint64_t tile_queries() const { return std::max(max_tile_queries, group_); }
    uint64_t tile_floats() const { return tile_queries() * config_.head_dim; }
    uint64_t visible_words() const { return tile_queries() * PI_ATTEND_PAGES; }
    uint64_t room_bytes() const {
        const auto n_bytes = PI_ATTEND_ROOM(tile_queries(), config_.head_dim);
        return (static_cast<uint64_t>(n_bytes) + 63) / 64 * 64;
    }
    // What rounding costs here is less than what int8 does to the activations of the layer's products.
    bool rounds() const {
        return args_.quantised && stream_.int8_activations && stream_.kernels.attend_rounded != nullptr &&
               args_.cache->shape().element_bytes == 2 && step_.n_tokens() > rounded_tokens;
    }
    uint64_t row_of(const Tile &tile, uint32_t kv_head) const {
        return tile.partial + uint64_t{kv_head} * (tile.token_end - tile.token_begin) * group_;
    }

    // The tile's queries of one KV head, scaled: [token][group head][head_dim].
    float *gather_queries(const Tile &tile, uint32_t kv_head, uint32_t thread) const {
        const float scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
        const uint64_t width = uint64_t{group_} * config_.head_dim;
        float *queries = queries_ + thread * tile_floats();
        for (uint32_t token = tile.token_begin; token < tile.token_end; ++token) {
            const float *from = args_.q + uint64_t{token} * config_.n_embd_q() + kv_head * width;
            float *to = queries + (token - tile.token_begin) * width;
            for (uint64_t i = 0; i < width; ++i)
                to[i] = from[i] * scale;
        }
        return queries;
    }

    Task task_at(int64_t index) const {
        const auto i = static_cast<uint32_t>(index);
        return {tiles_[i / config_.n_kv_heads], i % config_.n_kv_heads};
    }

    // next: what this thread is likely to do then.
    void attend_tile(const Task &task, const Task &next, uint32_t thread) const {
        const Tile &tile = task.tile;
        const uint32_t n_q = (tile.token_end - tile.token_begin) * group_;
        const uint64_t row = row_of(tile, task.kv_head);
        pi_attend work{};
        work.q = gather_queries(tile, task.kv_head, thread);
        work.out = partials_.out + row * config_.head_dim;
        work.peak = partials_.peak + row;
        work.sum = partials_.sum + row;
        work.n_q = n_q;
        work.head_dim = config_.head_dim;
        work.room = room_ == nullptr ? nullptr : room_ + thread * room_bytes();
        std::fill_n(work.out, uint64_t{n_q} * config_.head_dim, 0.0f);
        std::fill_n(work.peak, n_q, -std::numeric_limits<float>::infinity());
        std::fill_n(work.sum, n_q, 0.0f);
        uint32_t *visible = visible_ + thread * visible_words();
        for (uint32_t page = tile.page_begin; page < tile.page_end; page += PI_ATTEND_PAGES) {
            work.n_pages = std::min<uint32_t>(PI_ATTEND_PAGES, tile.page_end - page);
            attend_pages(task, next, page, visible, work);
        }
    }

    // Where the keys of a head of a page are; the values follow.
    const uint8_t *keys(const Task &task, uint32_t page) const {
        const uint32_t position = page * PI_PAGE;
        const uint32_t at = args_.cache->page_of(step_.sequences[task.tile.token_begin], position);
        return args_.cache->head(args_.layer, at, task.kv_head);
    }

    // The same where pages beyond the task's are those of the next one.
    const uint8_t *keys_ahead(const Task &task, const Task &next, uint32_t page) const {
        if (page < task.tile.page_end)
            return keys(task, page);
        const uint32_t beyond = page - task.tile.page_end;
        return keys(next, std::min(next.tile.page_begin + beyond, next.tile.page_end - 1));
    }

    // Pages [first, first + work.n_pages) of the task's sequence; visible: room for [n_pages, n_q].
    void attend_pages(const Task &task, const Task &next, uint32_t first, uint32_t *visible,
                      pi_attend &work) const {
        const Tile &tile = task.tile;
        work.visible = visible;
        for (uint32_t i = 0; i < work.n_pages; ++i) {
            for (uint32_t token = tile.token_begin; token < tile.token_end; ++token, visible += group_)
                std::fill_n(visible, group_, step_.visible(token, first + i));
        }
        const uint64_t half_bytes = args_.cache->shape().half_bytes();
        const auto end = first + static_cast<uint32_t>(work.n_pages);
        for (uint32_t i = 0; i < work.n_pages; ++i) {
            const uint8_t *head = keys(task, first + i), *ahead = keys_ahead(task, next, end + i);
            work.k[i] = head;
            work.v[i] = head + half_bytes;
            work.ahead[2 * i] = ahead; // in the order of memory, which comes faster than any other
            work.ahead[2 * i + 1] = ahead + half_bytes;
        }
        const pi_kernels &kernels = stream_.kernels;
        (room_ != nullptr                          ? kernels.attend_rounded
         : args_.cache->shape().element_bytes == 4 ? kernels.attend_f32
                                                   : kernels.attend_f16)(&work);
    }

    // Merges the spans of the tile at `first` into the output.
    void merge(size_t first) const {
        size_t end = first;
        while (end < tiles_.size() && tiles_[end].token_begin == tiles_[first].token_begin)
            ++end;
        const Tile &tile = tiles_[first];
        const uint32_t n_tokens = tile.token_end - tile.token_begin;
        for (uint32_t head = 0; head < config_.n_heads; ++head) {
            for (uint32_t t = 0; t < n_tokens; ++t) {
                const uint64_t row = (uint64_t{head / group_} * n_tokens + t) * group_ + head % group_;
                merge_row({tiles_.data() + first, end - first}, row, tile.token_begin + t, head);
            }
        }
    }

    void merge_row(std::span<const Tile> spans, uint64_t row, uint32_t token, uint32_t head) const {
        float peak = -std::numeric_limits<float>::infinity();
        for (const Tile &span : spans)
            peak = std::max(peak, partials_.peak[span.partial + row]);
        const auto weight = [&](const Tile &span) {
            return std::exp(partials_.peak[span.partial + row] - peak);
        };
        float sum = 0;
        for (const Tile &span : spans)
            sum += partials_.sum[span.partial + row] * weight(span);
        float *out = args_.out + uint64_t{token} * config_.n_embd_q() + uint64_t{head} * config_.head_dim;
        std::fill_n(out, config_.head_dim, 0.0f);
        for (const Tile &span : spans) {
            const float *part = partials_.out + (span.partial + row) * config_.head_dim;
            const float share = weight(span) / sum; // 0 where nothing is visible in the span
            for (uint32_t i = 0; i < config_.head_dim; ++i)
                out[i] += share * part[i];
        }
        if (args_.lse != nullptr)
            args_.lse[uint64_t{token} * config_.n_heads + head] = peak + std::log(sum);
    }

    CpuStream &stream_;
    const AttentionArgs &args_;
    const ModelConfig &config_;
    const Step &step_;
    const std::vector<Tile> tiles_;
    const uint32_t group_;
    Partials partials_{};
    float *queries_ = nullptr;
    uint32_t *visible_ = nullptr;
    uint8_t *room_ = nullptr; // of every thread, where factors are rounded
};

} // namespace

void cpu_attend(CpuStream &stream, const AttentionArgs &args) {
    Attention(stream, args).run();
}

} // namespace pi
