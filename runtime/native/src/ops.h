// ops.h: the operations a backend implements. An operation is queued on a Stream and may return before it is
// done; synchronize() waits for all of them. Arrays are float32, row-major, in the backend's memory.
#pragma once

#include "step.h"
#include "weights.h"

#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace pi {

// When a layer was begun and done in a step, in nanoseconds of the backend's clock. Of a split layer, on the
// device's side: when it had posted, computed its own neurons, and those it pulls; and what the CPU measured.
struct LayerStamps {
    uint64_t begin, posted, hot, shares, end;
    uint64_t cpu_wait_ns, cpu_ns;
};

// A backend's queue, with its threads or device and its scratch.
struct Stream {
    virtual ~Stream() = default;
    LayerStamps *stamps = nullptr; // [n_layers] there after synchronize(); null: layers are not timed
};

enum class Moment { begin, end };

// out [n_tokens, row_end - row_begin] = x . rows^T (+ bias)
struct Product {
    const Matrix *matrix;
    uint64_t row_begin;
    uint64_t row_end;
    const float *bias; // of the range's rows, or null
    float *out;
    bool add = false; // to what out holds
};

inline Product whole(const Matrix &matrix, const float *bias, float *out, bool add = false) {
    return {&matrix, 0, matrix.n_rows, bias, out, add};
}

// x [n_tokens, n] becomes x / rms(x) * gain before it is used.
struct InputNorm {
    const float *gain; // [n]
    float eps;
    float *out; // [n_tokens, n] may hold the result
};

struct FfnCounts {
    uint64_t total = 0;   // neurons x tokens
    uint64_t guessed = 0; // let through by the predictor (all, where there is none)
    uint64_t active = 0;  // whose up and down rows mattered
};

// Columns [begin, end) of a token's output are there; every column once, from any thread. begin is a multiple
// of delivered_columns.
using DeliverColumns = std::function<void(uint32_t token, uint32_t begin, uint32_t end)>;
constexpr uint32_t delivered_columns = 48; // three cache lines: no two threads write one

// Returns once the masks of tokens [begin, end) are there. Throws Error: they do not come.
using AwaitMasks = std::function<void(uint32_t begin, uint32_t end)>;

// Neurons [neuron_begin, neuron_end) of a layer's FFN: out = their share of the block's output.
struct FfnArgs {
    const ModelConfig *config;
    const LayerWeights *layer;
    uint32_t neuron_begin;
    uint32_t neuron_end;
    uint32_t n_tokens;
    const uint8_t *modes;      // [n_tokens] PI_FFN_*
    const uint32_t *positions; // [n_tokens]
    float sparse_threshold;    // predicted active iff logit >= this
    const InputNorm *norm;     // makes normed of residual; null: normed is there
    const float *normed;       // [n_tokens, n_embd]
    const float *residual;     // [n_tokens, n_embd] the predictor's input: the stream before ffn_norm
    const uint64_t *mask; // [n_tokens, mask_stride] bit i: neuron_begin + i is let through; null: predict
    uint64_t mask_stride;
    const AwaitMasks *await_masks; // called before mask is read, when all else is ready; null: it is there
    float *out;                    // [n_tokens, n_embd]
    float *add_to;                 // [n_tokens, n_embd] gets the share added, and out is scratch; or null
    const DeliverColumns *deliver; // what is told of out; or null
    FfnCounts *counts;             // added to
    uint64_t *fired; // token's first word of the record of neurons with an activation other than 0, or null
    uint64_t fired_stride; // words from one token to the next
};

// Of every token of a step.
struct RopeAngles {
    std::vector<float> cosine; // [n_tokens, n_rot / 2]
    std::vector<float> sine;   // [n_tokens, n_rot / 2]
};

// What a series of operations depends on beside what begin_step describes: two steps with one key queue the
// same operations with the same sizes.
using GraphKey = std::vector<uint32_t>;

enum class Graph {
    replayed,  // the series of the key is queued
    recording, // its operations are to be given, then end_graph
    none       // they are to be given, and are queued one by one
};

struct AttentionArgs {
    const ModelConfig *config;
    const KvCache *cache;
    const Step *step;
    uint32_t layer;
    const float *q; // [n_tokens, n_embd_q], placed
    float *out;     // [n_tokens, n_embd_q]
    float *lse;     // [n_tokens, n_heads] log-sum-exp of the scores, to merge homes; or null
    bool quantised; // the layer's weights are: factors may be rounded too
};

// task(part, n_parts) on every one of n_parts threads of the CPU; must not throw.
using OnThreads = std::function<void(const std::function<void(uint32_t part, uint32_t n_parts)> &task)>;

struct Ops {
    const char *name;
    float *(*allocate)(Stream &, uint64_t n_floats); // throws std::bad_alloc
    void (*release)(Stream &, float *);
    // Before the operations of a step, whose KV slots are reserved; all three outlive it.
    void (*begin_step)(Stream &, const KvCache &, const Step &, const RopeAngles &);
    // Series of operations that are recorded once and queued at once later; null: this backend has none.
    // Only operations between begin_step's copies and the results' may be among them. counts: what the
    // operations add to on the host.
    Graph (*begin_graph)(Stream &, const GraphKey &, FfnCounts &counts);
    // Queues what was recorded. False: it could not be kept, nor done; counts are as they were.
    bool (*end_graph)(Stream &, FfnCounts &counts);
    void (*abandon_graph)(Stream &) noexcept;

    void (*upload)(Stream &, const float *host, uint64_t n, float *out);
    void (*download)(Stream &, const float *x, uint64_t n, float *host); // done after synchronize()

    // out [n_rows, n] = rows step.rows[begin + i] of x
    void (*gather)(Stream &, const Step &, const float *x, uint32_t begin, uint32_t n_rows, uint32_t n,
                   float *out);
    // out [n_tokens, n_embd] = rows of the embedding
    void (*embed)(Stream &, const Matrix &embedding, const Step &, float *out);
    // every row: out = x / rms(x) * gain
    void (*rms_norm)(Stream &, const float *x, const float *gain, uint32_t n_rows, uint32_t n, float eps,
                     float *out);
    // products of one input x [n_tokens, n_cols], normalised with a norm; positions [n_tokens] of the tokens,
    // or null: attention sinks deserve more precision
    void (*matmul)(Stream &, std::span<const Product> products, const float *x, const InputNorm *norm,
                   const uint32_t *positions, uint32_t n_tokens);
    // q [n_tokens, n_heads, head_dim] turned by the step's angles; k [n_tokens, n_kv_heads, head_dim],
    // turned, and v into the tokens' slots; k is not kept
    void (*place_heads)(Stream &, const AttentionArgs &, float *q, float *k, const float *v);
    void (*attend)(Stream &, const AttentionArgs &);
    void (*ffn)(Stream &, const FfnArgs &);
    // out [n_rows, top_words(n_top)] = what merge_top() makes of each row
    void (*top)(Stream &, const float *logits, uint32_t n_rows, uint32_t n_vocab, uint32_t n_top, float *out);
    // host [n_rows] = natural log of softmax(logits)[target], NaN where the target is negative
    void (*log_probabilities)(Stream &, const float *logits, uint32_t n_rows, uint32_t n_vocab,
                              const int32_t *targets, float *host);
    void (*synchronize)(Stream &);

    // The CPU's shares of split layers come next, or no more; null: not this backend's.
    void (*expect_shares)(Stream &, bool);
    // task(part, n_parts) on every one of n_parts threads; must not throw. null: not this backend's.
    void (*on_threads)(Stream &, const std::function<void(uint32_t part, uint32_t n_parts)> &task);

    // Layers are timed from the next step on, or not (0).
    void (*time_layers)(Stream &, uint32_t n_layers);
    // Where layers are timed: a layer begins or ends here.
    void (*mark)(Stream &, uint32_t layer, Moment);
};

struct Backend {
    const Ops *ops;
    std::unique_ptr<Stream> stream;
    const char *isa; // or the device's name
};

} // namespace pi
