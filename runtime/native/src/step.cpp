#include "step.h"

#include "status.h"

#include <algorithm>

namespace pi {
namespace {

constexpr uint32_t top_step = 64;

void require_token(int32_t token, uint32_t n_vocab, const char *what) {
    if (token < 0 || static_cast<uint32_t>(token) >= n_vocab)
        throw_usage(std::string(what) + " " + std::to_string(token) + " is not in the vocabulary of " +
                    std::to_string(n_vocab));
}

} // namespace

Step::Step(const pi_batch &batch, const ModelConfig &config, const KvCache &cache, uint32_t max_tokens)
    : sliding_window_(config.sliding_window) {
    require_size(batch, "batch");
    if (batch.n_tokens == 0 || batch.n_tokens > max_tokens)
        throw_usage("a batch of " + std::to_string(batch.n_tokens) + " tokens is not in 1 .. " +
                    std::to_string(max_tokens));
    if ((batch.tokens == nullptr) == (batch.embeddings == nullptr))
        throw_usage("a batch has either tokens or embeddings");
    if (batch.positions == nullptr || batch.sequences == nullptr)
        throw_usage("a batch needs positions and sequences");
    if (batch.n_position_axes != 1)
        throw_usage("this model takes one position axis");
    if (batch.tokens != nullptr) {
        tokens.assign(batch.tokens, batch.tokens + batch.n_tokens);
        for (const int32_t token : tokens)
            require_token(token, config.n_vocab, "token");
    } else {
        embeddings.assign(batch.embeddings, batch.embeddings + size_t{batch.n_tokens} * config.n_embd);
    }
    read_tree(batch);
    place(batch, cache);
    read_outputs(batch, config);
}

void Step::read_tree(const pi_batch &batch) {
    if (batch.tree_mask == nullptr)
        return;
    const size_t words = (batch.n_tokens + 63) / 64;
    tree_mask_.assign(batch.tree_mask, batch.tree_mask + words * batch.n_tokens);
}

void Step::place(const pi_batch &batch, const KvCache &cache) {
    for (uint32_t i = 0; i < batch.n_tokens; ++i) {
        const int32_t sequence = batch.sequences[i];
        const uint32_t old_length = cache.length(sequence);
        auto grown =
            std::find_if(growth.begin(), growth.end(), [&](auto &entry) { return entry.first == sequence; });
        if (grown == growth.end())
            grown = growth.insert(growth.end(), {sequence, 0});
        const uint32_t slot = old_length + grown->second++;
        const int32_t position = batch.positions[i];
        // Without a tree, a position is its place in the sequence; siblings in a tree share one.
        const bool in_order = has_tree() ? position >= static_cast<int32_t>(old_length)
                                         : position == static_cast<int32_t>(slot);
        if (position < 0 || !in_order || static_cast<uint32_t>(position) > slot)
            throw_usage("position " + std::to_string(position) + " of sequence " + std::to_string(sequence) +
                        " does not follow its " + std::to_string(slot) + " tokens");
        positions.push_back(static_cast<uint32_t>(position));
        sequences.push_back(sequence);
        slots.push_back(slot);
        old_lengths_.push_back(old_length);
        const uint8_t rule = batch.ffn_rules == nullptr ? uint8_t{PI_RULE_AUTO} : batch.ffn_rules[i];
        if (rule > PI_RULE_EXACT)
            throw_usage("unknown FFN rule " + std::to_string(rule));
        rules.push_back(rule);
    }
}

void Step::read_outputs(const pi_batch &batch, const ModelConfig &config) {
    if (batch.targets != nullptr)
        targets.assign(batch.targets, batch.targets + batch.n_tokens);
    for (const int32_t target : targets) {
        if (target != -1)
            require_token(target, config.n_vocab, "target");
    }
    for (uint32_t i = 0; i < batch.n_tokens; ++i) {
        const bool want = batch.want_logits != nullptr && batch.want_logits[i] != 0;
        if (want) {
            wanted.push_back(i);
            tops.push_back(batch.want_top == nullptr ? 0 : batch.want_top[i]);
            n_top = std::max(n_top, tops.back());
        }
        if (want || (!targets.empty() && targets[i] >= 0))
            rows.push_back(i);
    }
    if (n_top > PI_MAX_TOP)
        throw_usage("want_top is at most " + std::to_string(PI_MAX_TOP));
    if (n_top > 1) // a graph for each size
        n_top = (n_top + top_step - 1) / top_step * top_step;
}

uint32_t Step::oldest_visible(uint32_t token) const {
    const uint32_t seen = positions[token] + 1;
    return sliding_window_ == 0 || seen <= sliding_window_ ? 0 : seen - sliding_window_;
}

uint32_t Step::visible(uint32_t token, uint32_t page) const {
    const uint32_t begin = page * PI_PAGE;
    const uint32_t newest = has_tree() ? std::max(old_lengths_[token], 1u) - 1 : slots[token];
    uint32_t bits = 0;
    if (newest >= begin && (!has_tree() || old_lengths_[token] > 0)) {
        const uint32_t n = std::min<uint32_t>(newest - begin + 1, PI_PAGE);
        bits = n == 32 ? ~0u : (1u << n) - 1;
    }
    const uint32_t oldest = oldest_visible(token);
    if (oldest > begin)
        bits &= oldest - begin >= 32 ? 0u : ~0u << (oldest - begin);
    if (!has_tree())
        return bits;
    for (uint32_t j = 0; j < n_tokens(); ++j) {
        const bool on_page = sequences[j] == sequences[token] && slots[j] / PI_PAGE == page;
        if (on_page && tree_bit(token, j))
            bits |= 1u << (slots[j] % PI_PAGE);
    }
    return bits;
}

std::vector<uint64_t> Step::slot_tree() const {
    if (!has_tree())
        return {};
    uint32_t longest = 0;
    for (const auto &[sequence, n] : growth)
        longest = std::max(longest, n);
    const size_t words = (longest + 63) / 64;
    std::vector<uint64_t> tree(words * n_tokens());
    for (uint32_t token = 0; token < n_tokens(); ++token) {
        for (uint32_t j = 0; j < n_tokens(); ++j) {
            if (sequences[j] != sequences[token] || !tree_bit(token, j))
                continue;
            const uint32_t at = slots[j] - old_lengths_[j];
            tree[token * words + at / 64] |= uint64_t{1} << (at % 64);
        }
    }
    return tree;
}

} // namespace pi
