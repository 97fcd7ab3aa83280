// step.h: one batch of new tokens, checked and laid out for the backends.
#pragma once

#include "kv.h"
#include "pi.h"

#include <vector>

namespace pi {

class Step {
  public:
    // Copies and checks the batch; throws Error (PI_USAGE). Nothing in the cache changes.
    Step(const pi_batch &batch, const ModelConfig &config, const KvCache &cache, uint32_t max_tokens);

    uint32_t n_tokens() const { return static_cast<uint32_t>(positions.size()); }
    // Bit p: `token` attends to position p of page `page` (an index into its sequence's pages).
    uint32_t visible(uint32_t token, uint32_t page) const;
    // Pages [first, end) of its sequence that hold anything visible to the token.
    uint32_t first_page(uint32_t token) const { return oldest_visible(token) / PI_PAGE; }
    uint32_t end_page(uint32_t token) const { return slots[token] / PI_PAGE + 1; }
    bool has_tree() const { return !tree_mask_.empty(); }
    // First position of its sequence that the token sees.
    uint32_t oldest_visible(uint32_t token) const;
    // Tokens of its sequence before the step.
    uint32_t old_length(uint32_t token) const { return old_lengths_[token]; }
    // [n_tokens, words] bit j: the token sees slot old_length + j of its sequence; empty without a tree.
    std::vector<uint64_t> slot_tree() const;

    std::vector<int32_t> tokens;                      // [n_tokens], or empty with embeddings
    std::vector<float> embeddings;                    // [n_tokens, n_embd], or empty
    std::vector<uint32_t> positions;                  // [n_tokens] for rope and the sink rule
    std::vector<int32_t> sequences;                   // [n_tokens]
    std::vector<uint32_t> slots;                      // [n_tokens] place in the sequence's pages
    std::vector<uint32_t> wanted;                     // tokens whose logits are wanted, ascending
    std::vector<uint32_t> tops;                       // [wanted] 0: all logits, else how many of the largest
    uint32_t n_top = 0;                               // found in every row: the most of tops, rounded up
    std::vector<uint32_t> rows;                       // those and the ones with a target, ascending
    std::vector<int32_t> targets;                     // [n_tokens] or empty
    std::vector<uint8_t> rules;                       // [n_tokens] PI_RULE_*
    std::vector<std::pair<int32_t, uint32_t>> growth; // sequence -> its new tokens

  private:
    void place(const pi_batch &batch, const KvCache &cache);
    void read_outputs(const pi_batch &batch, const ModelConfig &config);
    void read_tree(const pi_batch &batch);
    bool tree_bit(uint32_t token, uint32_t other) const {
        const size_t words = (positions.size() + 63) / 64;
        return (tree_mask_[token * words + other / 64] >> (other % 64) & 1) != 0;
    }

    uint32_t sliding_window_;
    std::vector<uint32_t> old_lengths_; // [n_tokens] of the token's sequence, before the step
    std::vector<uint64_t> tree_mask_;   // [n_tokens, ceil(n_tokens / 64)] or empty
};

} // namespace pi
