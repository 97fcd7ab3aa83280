/* pi.h: the C11 interface of the PowerInfer toolkit runtime (libpi).
 *
 * Every function that can fail returns a pi_status; the message and the hint of the calling thread's
 * last failure are read with pi_last_error() and pi_last_hint(). Nothing here exits, aborts or prints.
 * Structs start with `size` (sizeof of the caller's struct), so that later versions can append fields. */
#ifndef PI_H
#define PI_H

#include <stdint.h>

#if defined(_WIN32)
#define PI_API __declspec(dllexport)
#else
#define PI_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define PI_ABI_VERSION 1u

/* Status codes equal the command line's exit codes. */
typedef int32_t pi_status;
enum { PI_OK = 0, PI_FAILURE = 1, PI_USAGE = 2, PI_DOES_NOT_FIT = 3, PI_INTERRUPTED = 130 };

/* Tensor types, by their GGUF ids. */
enum {
    PI_TYPE_F32 = 0,
    PI_TYPE_F16 = 1,
    PI_TYPE_Q4_0 = 2,
    PI_TYPE_Q4_1 = 3,
    PI_TYPE_Q5_0 = 6,
    PI_TYPE_Q5_1 = 7,
    PI_TYPE_Q8_0 = 8,
    PI_TYPE_Q2_K = 10,
    PI_TYPE_Q3_K = 11,
    PI_TYPE_Q4_K = 12,
    PI_TYPE_Q5_K = 13,
    PI_TYPE_Q6_K = 14,
    PI_TYPE_IQ4_NL = 20,
    PI_TYPE_BF16 = 30,
    PI_TYPE_MXFP4 = 39,
    PI_TYPE_NVFP4 = 40
};

/* Most of a row's largest logits that a step finds. */
#define PI_MAX_TOP 256u

enum { PI_ACTIVATION_SILU = 0, PI_ACTIVATION_RELU = 1 };
enum { PI_FFN_DENSE = 0, PI_FFN_EXACT = 1, PI_FFN_PREDICTED = 2 };

typedef struct pi_model pi_model;     /* an open file: metadata, configuration, weights */
typedef struct pi_engine pi_engine;   /* a model under a plan: threads, KV pages, scratch */
typedef struct pi_sampler pi_sampler; /* sampling state of one sequence */

/* ---- library ------------------------------------------------------------------------------------- */

PI_API uint32_t pi_abi_version(void);
PI_API const char *pi_last_error(void); /* "" when the thread's last call succeeded */
PI_API const char *pi_last_hint(void);
/* Instruction sets compiled in, from the slowest: name, and whether this processor can run it. */
PI_API uint32_t pi_isa_count(void);
PI_API pi_status pi_isa(uint32_t index, const char **name, uint32_t *usable);
/* The set that an engine takes: `requested`, else $PI_ISA, else the best usable one. */
PI_API pi_status pi_isa_select(const char *requested, const char **name);
/* The devices that plans can place units on; 0 of them with the reason in pi_last_error(). */
PI_API uint32_t pi_gpu_count(void);
typedef struct pi_gpu_device {
    uint32_t size;
    int32_t capability; /* 10 * major + minor */
    uint32_t n_processors;
    uint32_t reserved;
    const char *name; /* until the thread's next probe */
    uint64_t total_bytes;
    uint64_t free_bytes;    /* beside the context */
    uint64_t context_bytes; /* what using the device takes, or a reserve for it */
} pi_gpu_device;
/* Opens the device for a moment; its context stays with the process. */
PI_API pi_status pi_gpu_probe(uint32_t ordinal, pi_gpu_device *out);
/* The rate at which the device reads n_bytes (at least 1 MiB, whole MiB of it, allocated for the call) of its
 * own memory, or of the host's through pinned mapped memory (from_host 1): of the fastest pass, of at least
 * three and at least min_seconds of them. May run beside pi_probe_read. */
PI_API pi_status pi_gpu_probe_read(uint32_t ordinal, uint32_t from_host, uint64_t n_bytes, float min_seconds,
                                   uint64_t *bytes_per_second);
PI_API pi_status pi_type_layout(uint32_t type, uint32_t *block_elements, uint32_t *block_bytes);
/* The rate at which n_threads read n_bytes of memory (1 MiB to 1 TiB, whole MiB of it), allocated for the
 * call: of the fastest pass, of at least three and at least min_seconds of them. */
PI_API pi_status pi_probe_read(uint32_t n_threads, uint64_t n_bytes, float min_seconds,
                               uint64_t *bytes_per_second);
/* level: 0 error, 1 warning, 2 info, 3 debug. One callback a process; NULL turns it off. */
typedef void (*pi_log_fn)(int32_t level, const char *message, void *user);
PI_API void pi_set_log(pi_log_fn callback, void *user);

/* ---- model file ---------------------------------------------------------------------------------- */

/* A metadata value inside the mapped file; valid while the model is open. Scalars: `data` points to
 * `n_bytes` little-endian bytes, maybe unaligned. Strings: `n_bytes` bytes of UTF-8, no terminator. Arrays:
 * `count` elements of `element_type`; string elements are a u64 length and the bytes, one after the other. */
typedef struct pi_value {
    uint32_t size;
    uint32_t type;         /* GGUF value type id (8 string, 9 array, ...) */
    uint32_t element_type; /* of an array, else equal to type */
    uint32_t reserved;
    uint64_t count; /* elements of an array, else 1 */
    uint64_t n_bytes;
    const void *data;
} pi_value;

typedef struct pi_tensor_info {
    uint32_t size;
    uint32_t type;
    uint32_t n_dims;
    uint32_t reserved;
    uint64_t shape[4]; /* GGUF order: the contiguous dimension first; 1 beyond n_dims */
    uint64_t n_bytes;
    const void *data;
} pi_tensor_info;

typedef struct pi_model_config {
    uint32_t size;
    uint32_t n_layers;
    uint32_t n_embd;
    uint32_t n_ff;
    uint32_t n_vocab;
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t n_rot;
    uint32_t n_ctx_train;
    uint32_t sliding_window; /* 0: none */
    uint32_t activation;     /* PI_ACTIVATION_* */
    uint32_t sparse_layout;  /* 1: the file stores ffn_down_t */
    uint32_t has_predictors; /* 1: every layer has fc1 and fc2 */
    uint32_t sink_positions; /* leading positions that predicted mode computes exactly */
    uint32_t tied_head;
    uint32_t float32_weights; /* 1: every matrix but the predictors' is F32 */
    float activation_threshold;
    float sparse_threshold; /* a neuron is predicted active iff its logit >= this */
    float rms_eps;
    float rope_theta;
    uint64_t weight_bytes;
} pi_model_config;

PI_API pi_status pi_model_open(const char *path, pi_model **out);
PI_API void pi_model_close(pi_model *model); /* after its engines; NULL is allowed */
PI_API pi_status pi_model_get_config(const pi_model *model, pi_model_config *out);
PI_API uint64_t pi_model_key_count(const pi_model *model);
PI_API pi_status pi_model_key(const pi_model *model, uint64_t index, const char **name, pi_value *out);
/* PI_OK with out->data == NULL when the file has no such key. */
PI_API pi_status pi_model_find_key(const pi_model *model, const char *name, pi_value *out);
PI_API uint64_t pi_model_tensor_count(const pi_model *model);
PI_API pi_status pi_model_tensor(const pi_model *model, uint64_t index, const char **name,
                                 pi_tensor_info *out);

/* ---- plan ---------------------------------------------------------------------------------------- */

/* A unit is a piece of a layer (or of the model, layer = 0) whose weights or state live in one place. */
enum {
    PI_UNIT_EMBEDDING = 0,
    PI_UNIT_ATTENTION = 1,
    PI_UNIT_KV = 2,
    PI_UNIT_PREDICTOR = 3,
    PI_UNIT_NEURONS = 4, /* FFN neurons [begin, end) of the layer */
    PI_UNIT_HEAD = 5
};
/* Where a unit's weights are used from. */
enum { PI_PLACE_CPU = 0, PI_PLACE_GPU = 1, PI_PLACE_STREAM = 2, PI_PLACE_PULL = 3 };

typedef struct pi_unit {
    uint32_t kind;
    uint32_t layer;
    uint32_t begin;
    uint32_t end;
    uint32_t placement;
} pi_unit;

/* How the sides of a split layer wait for each other: as the device allows it; kernels that poll; the
 * stream's own wait for a value; one launch after the other, where nothing on the device ever waits. */
enum { PI_HANDOVER_AUTO = 0, PI_HANDOVER_SPIN = 1, PI_HANDOVER_WAIT_VALUE = 2, PI_HANDOVER_EVENT = 3 };

/* Schedule of the steps with at most max_tokens new tokens (and more than the tier before). */
typedef struct pi_tier {
    uint32_t max_tokens;
    uint32_t ffn_mode; /* PI_FFN_* */
} pi_tier;

typedef struct pi_plan {
    uint32_t size;
    uint32_t n_units;
    const pi_unit *units;
    const pi_tier *tiers; /* ascending; the last one covers max_batch_tokens */
    uint32_t n_tiers;
    uint32_t n_threads;
    uint32_t max_batch_tokens;
    uint32_t n_sequences;        /* sequence ids are 0 .. n_sequences - 1 */
    uint32_t n_context;          /* most tokens in one sequence */
    uint32_t n_kv_pages;         /* pages of 32 tokens, shared by all sequences */
    uint32_t kv_type;            /* PI_TYPE_F32 or PI_TYPE_F16 */
    uint32_t activation_type;    /* PI_TYPE_F32, or PI_TYPE_Q8_0: int8 blocks against quantised weights */
    uint32_t predict_all;        /* 1: upstream's rule, every position of every step is masked */
    float sparse_threshold;      /* NaN: the file's */
    const char *isa;             /* NULL: as pi_isa_select(NULL) */
    uint64_t vram_budget_bytes;  /* ceiling of everything on the device, where units are placed there */
    uint32_t predict_split_only; /* 1: predicted tiers hold for split layers, others are exact */
    uint32_t handover;           /* PI_HANDOVER_* */
    /* Steps of at least so many new tokens (17 or more) compute the CPU's neurons of split layers on the
     * device, which their weights pass through in pieces of so many bytes; 0: none do. */
    uint32_t stream_tokens;
    uint32_t stream_piece_bytes; /* twice in device memory, and twice in pinned host memory */
} pi_plan;

/* ---- engine -------------------------------------------------------------------------------------- */

/* Polled between layers, from the engine's thread; non-zero ends the step with PI_INTERRUPTED. */
typedef int32_t (*pi_abort_fn)(void *user);

/* What predicted mode does with one token: as the plan's tier says, masked, or every neuron exactly.
 * PI_RULE_PREDICT still leaves sink positions exact (unless the plan says predict_all). */
enum { PI_RULE_AUTO = 0, PI_RULE_PREDICT = 1, PI_RULE_EXACT = 2 };

typedef struct pi_batch {
    uint32_t size;
    uint32_t n_tokens;
    const int32_t *tokens;      /* [n_tokens], or NULL with embeddings */
    const float *embeddings;    /* [n_tokens, n_embd], or NULL */
    const int32_t *positions;   /* [n_position_axes, n_tokens] */
    const int32_t *sequences;   /* [n_tokens] */
    const uint64_t *tree_mask;  /* [n_tokens, ceil(n_tokens / 64)] or NULL: bit j of row i = token i sees
                                 * token j of the same sequence in this batch; all older tokens are seen */
    const uint8_t *want_logits; /* [n_tokens] or NULL: none */
    const int32_t *targets;     /* [n_tokens] token whose log-probability is wanted, -1 none; or NULL */
    const uint8_t *ffn_rules;   /* [n_tokens] PI_RULE_*, or NULL: all PI_RULE_AUTO */
    uint32_t n_position_axes;   /* 1 for text */
    uint32_t reserved;
    const uint32_t *want_top; /* [n_tokens] of a wanted token: 0, or so many of its largest logits instead of
                               * all, at most PI_MAX_TOP; or NULL: all 0 */
} pi_batch;

typedef struct pi_stats {
    uint32_t size;
    uint32_t n_threads;
    uint64_t n_tokens;        /* tokens processed */
    uint64_t neurons_total;   /* FFN neurons x tokens */
    uint64_t neurons_active;  /* of those, the ones whose up and down rows mattered (dense: all) */
    uint64_t neurons_guessed; /* of those, the ones a predictor let through (not predicted: total) */
    uint64_t kv_bytes;
    uint64_t scratch_bytes;
    const char *isa;
    const char *device;             /* the GPU's name; NULL: none is open */
    uint64_t device_bytes;          /* taken there, the context included */
    uint64_t device_context_bytes;  /* of that, the context, or the reserve for it */
    uint64_t device_launches;       /* kernels and copies queued there since the engine was made */
    uint64_t device_graph_launches; /* series of them that were queued at once, as graphs */
    uint64_t pinned_bytes;          /* host memory that the device reads and writes */
    uint32_t handover;              /* PI_HANDOVER_* of split layers; PI_HANDOVER_AUTO: there are none */
    uint32_t reserved;
} pi_stats;

/* Of one layer, in nanoseconds summed over the steps since its timing began; the GPU's by its own clock. */
typedef struct pi_layer_times {
    uint64_t n_steps;
    uint64_t cpu_ns;      /* the CPU computed: the layer, or its neurons of a split one */
    uint64_t cpu_wait_ns; /* it waited for what the GPU posts */
    uint64_t gpu_ns;      /* the GPU computed, but for pulled neurons */
    uint64_t pull_ns;     /* it computed pulled neurons */
    uint64_t gpu_wait_ns; /* it waited for the CPU's share, the way there and back included */
    uint64_t handover_ns; /* of gpu_wait_ns, that way: neither side computed */
} pi_layer_times;

PI_API pi_status pi_engine_create(pi_model *model, const pi_plan *plan, pi_engine **out);
PI_API void pi_engine_free(pi_engine *engine); /* waits for a running step; NULL is allowed */
PI_API pi_status pi_engine_set_abort(pi_engine *engine, pi_abort_fn callback, void *user);
/* Starts one step and returns; the batch is copied. At most one step is in flight. A step that fails
 * leaves every sequence as it was. */
PI_API pi_status pi_engine_submit(pi_engine *engine, const pi_batch *batch, uint64_t *ticket);
/* Waits for a step, at most timeout_ms (UINT32_MAX: for ever); *done says whether it has ended. A caller that
 * must react to signals waits in slices and ends the step with pi_engine_abort. The step's failure is this
 * call's status. */
PI_API pi_status pi_engine_wait(pi_engine *engine, uint64_t ticket, uint32_t timeout_ms, uint32_t *done);
/* Ends the running step with PI_INTERRUPTED at its next layer; callable from any thread. */
PI_API pi_status pi_engine_abort(pi_engine *engine);
/* Of the last finished step; valid until the next submit. Rows follow the batch's wanted tokens, without
 * those whose want_top is not 0. */
PI_API pi_status pi_engine_logits(const pi_engine *engine, uint32_t *n_rows, const float **data);
/* Of the wanted token `row`, whose want_top is not 0: its largest logits [*n], the largest first, equal ones
 * by token, NaN before all; and the natural log of the sum of exp(logit - largest) over the vocabulary, so
 * that a token's log-probability is its logit - largest - log_sum. Valid until the next submit. */
PI_API pi_status pi_engine_top(const pi_engine *engine, uint32_t row, uint32_t *n, const int32_t **tokens,
                               const float **logits, float *log_sum);
/* [n_tokens] natural-log probabilities of the batch's targets, NaN where none was asked. */
PI_API pi_status pi_engine_logprobs(const pi_engine *engine, uint32_t *n, const float **data);
/* Turns on (or off) the record of which neurons fire; it costs time and memory. */
PI_API pi_status pi_engine_set_recording(pi_engine *engine, uint32_t on);
/* Of the last finished step, when recording: bit n % 64 of word [token, layer, n / 64] = neuron n of the
 * layer had an activation other than 0. [n_tokens, n_layers, n_words], n_words = ceil(n_ff / 64). */
PI_API pi_status pi_engine_fired(const pi_engine *engine, uint32_t *n_tokens, uint32_t *n_words,
                                 const uint64_t **data);
/* Turns the timing of layers on, from zero, or off; it costs a split layer some microseconds. */
PI_API pi_status pi_engine_set_timing(pi_engine *engine, uint32_t on);
/* out: [n_layers]; zeros unless layers are timed. */
PI_API pi_status pi_engine_layer_times(const pi_engine *engine, pi_layer_times *out);
PI_API pi_status pi_engine_stats(const pi_engine *engine, pi_stats *out);
PI_API pi_status pi_engine_reset_stats(pi_engine *engine);

/* ---- KV cache ------------------------------------------------------------------------------------ */

PI_API pi_status pi_kv_length(const pi_engine *engine, int32_t sequence, uint32_t *n_tokens);
/* Keeps the first n_tokens of a sequence; 0 empties it. */
PI_API pi_status pi_kv_truncate(pi_engine *engine, int32_t sequence, uint32_t n_tokens);
/* Makes `to` a copy of `from`; full pages are shared until one of them is written. */
PI_API pi_status pi_kv_copy(pi_engine *engine, int32_t from, int32_t to);
/* Saves a sequence: with data NULL only sets *n_bytes. Loading checks shape and type. */
PI_API pi_status pi_kv_save(const pi_engine *engine, int32_t sequence, void *data, uint64_t *n_bytes);
PI_API pi_status pi_kv_load(pi_engine *engine, int32_t sequence, const void *data, uint64_t n_bytes);

/* ---- sampling ------------------------------------------------------------------------------------ */

typedef struct pi_sampler_params {
    uint32_t size;
    int32_t top_k; /* <= 0: all */
    uint64_t seed;
    float temperature; /* <= 0: greedy */
    float top_p;       /* >= 1: off */
    float min_p;       /* <= 0: off */
    float repeat_penalty;
    int32_t repeat_last_n; /* -1: everything */
    uint32_t reserved;
} pi_sampler_params;

PI_API pi_status pi_sampler_create(const pi_sampler_params *params, pi_sampler **out);
PI_API void pi_sampler_free(pi_sampler *sampler);
/* Tells the sampler of a token of the text (prompt tokens too), for the repeat penalty. */
PI_API pi_status pi_sampler_accept(pi_sampler *sampler, int32_t token);
/* How many of the largest logits the next draw needs (want_top) to be the same as from all; 0: all of them.
 */
PI_API pi_status pi_sampler_top(const pi_sampler *sampler, uint32_t *n_top);
/* Draws from the logits of the engine's last step of the wanted token `row`: all, or the largest ones.
 * *logprob is the token's log-probability under the model's own distribution; NULL spares its computation. */
PI_API pi_status pi_sampler_sample(pi_sampler *sampler, const pi_engine *engine, uint32_t row, int32_t *token,
                                   float *logprob);
PI_API pi_status pi_sampler_sample_logits(pi_sampler *sampler, const float *logits, uint32_t n_vocab,
                                          int32_t *token, float *logprob);

/* ---- kernels by name, for parity tests and the kernel lab ---------------------------------------- */

/* out [n] = elements [begin, begin + n) of a row; begin is a multiple of the type's block. */
PI_API pi_status pi_kernel_dequantize(const char *isa, uint32_t type, const void *row, int64_t begin,
                                      int64_t n, float *out);
/* out [n_rows]: dot products of rows index[i] (or i, with NULL) of a matrix with x [n_cols];
 * activation_type PI_TYPE_F32 or PI_TYPE_Q8_0. */
PI_API pi_status pi_kernel_dot_rows(const char *isa, uint32_t type, uint32_t activation_type,
                                    const void *matrix, const int32_t *index, int64_t n_rows, int64_t n_cols,
                                    const float *x, float *out);
/* out [n_tokens, n_rows] = x [n_tokens, n_cols] as int8 blocks . rows^T; PI_USAGE where the instruction set
 * has no such product. */
PI_API pi_status pi_kernel_multiply_rows(const char *isa, uint32_t type, const void *matrix, int64_t n_rows,
                                         int64_t n_cols, const float *x, int64_t n_tokens, float *out);
/* out [n] += sum_i coef[i] * row index[i], columns [begin, begin + n). */
PI_API pi_status pi_kernel_axpy_rows(const char *isa, uint32_t type, const void *matrix, const int32_t *index,
                                     int64_t n_rows, int64_t n_cols, const float *coef, int64_t begin,
                                     int64_t n, float *out);
PI_API pi_status pi_kernel_rms_norm(const char *isa, const float *x, const float *gain, int64_t n, float eps,
                                    float *out);
/* out [n] = act(gate) * up; PI_ACTIVATION_*. */
PI_API pi_status pi_kernel_gated(const char *isa, uint32_t activation, float threshold, const float *gate,
                                 const float *up, int64_t n, float *out);
/* out [n_tokens, n_rows] = x [n_tokens, n_k] . w^T, w [n_rows, n_k]; transposed != 0: w [n_k, n_rows]. */
PI_API pi_status pi_kernel_gemm(const char *isa, const float *w, uint32_t transposed, int64_t n_rows,
                                int64_t n_k, const float *x, int64_t n_tokens, float *out);
/* One head: q [n_q, head_dim], k and v [n_positions, head_dim]; query i sees positions <= n_positions - n_q +
 * i. out [n_q, head_dim], lse [n_q] = log of the sum of exp(scale * q . k). kv_type F32, F16, or BF16: of
 * an F16 cache, with factors rounded, where the instruction set has that. */
PI_API pi_status pi_kernel_attention(const char *isa, uint32_t kv_type, const float *q, int64_t n_q,
                                     const float *k, const float *v, int64_t n_positions, int64_t head_dim,
                                     float scale, float *out, float *lse);

#ifdef __cplusplus
}
#endif
#endif
