/* pi_gpu.h: the C interface between libpi and a library for one kind of device (libpi_cuda). The library
 * knows memory, matrices and operations; layers, sequences and plans are libpi's.
 *
 * Operations are queued on the device's stream and return at once, with PI_OK or the status of a failure
 * whose text error() gives; a failure inside a queued operation is reported by synchronize(). One thread at a
 * time uses a device. Arrays are float32, row-major, in device memory, unless said otherwise. Nothing here
 * throws, prints or exits. */
#ifndef PI_GPU_H
#define PI_GPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PI_GPU_ABI 7u
#define PI_GPU_ENTRY "pi_gpu_api_get"
#define PI_GPU_MAX_PRODUCTS 4
#define PI_GPU_TOP_LOGITS 2048u /* of a row that a block of top searches */
#define PI_GPU_TOP_ROWS 16u     /* that have lists at a time */

typedef struct pi_gpu pi_gpu;             /* an open device: context, stream, memory under a budget */
typedef struct pi_gpu_graph pi_gpu_graph; /* recorded operations */

typedef struct pi_gpu_info {
    char name[128];
    int32_t capability; /* 10 * major + minor */
    int32_t n_processors;
    uint64_t total_bytes;
    uint64_t free_bytes; /* now */
    uint64_t
        context_bytes; /* what opening the device took, or a reserve for it where that cannot be measured */
    uint64_t mapped_bytes; /* taken for allocations */
    uint64_t budget_bytes;
    uint64_t graph_limit_bytes; /* of the budget, kept for graphs */
    uint64_t graph_bytes;       /* taken by them, as far as the device's free memory tells */
    uint64_t n_launches;        /* kernels and copies queued so far, a graph's whenever it is launched */
} pi_gpu_info;

/* Rows of a matrix as multiply() and others read them. The bytes of a row are those of the file's, its
 * blocks' fields side by side instead of interleaved; rows are row_stride apart. on_host: they lie in pinned
 * host memory, so that a product on the matrix units reads each once, into device memory. */
typedef struct pi_gpu_rows {
    const void *data;
    uint64_t row_stride;
    uint32_t kernel_type; /* PI_KT_* */
    uint32_t n_cols;      /* a multiple of 32 */
    uint32_t n_rows;
    uint32_t on_host;
} pi_gpu_rows;

/* out[t * n_rows + r] (add: +)= row r . token t (+ bias[r]); relu: 0 instead of what is below. */
typedef struct pi_gpu_product {
    pi_gpu_rows rows;
    const float *bias; /* [n_rows] or NULL */
    float *out;        /* [n_tokens, n_rows] */
    uint32_t add;
    uint32_t relu;
} pi_gpu_product;

/* Vectors x [n_tokens, n_cols] are to be x / sqrt(mean of squares + eps) * gain. */
typedef struct pi_gpu_norm {
    const float *gain; /* [n_cols] */
    float eps;
    float *out; /* [n_tokens, n_cols] for operations that need them so; its contents are undefined */
} pi_gpu_norm;

/* Lets neuron i through where row i of fc2 . hidden >= threshold. */
typedef struct pi_gpu_predictor {
    pi_gpu_rows fc2;     /* [neurons, rank] */
    const float *hidden; /* [rank] */
    float threshold;
    float *logits;  /* [neurons], for types of fc2 that need them so; its contents are undefined */
    uint32_t *mask; /* [ceil(neurons / 32)] likewise */
} pi_gpu_predictor;

/* One token's neurons: out[i] = act(gate row i . x) * (up row i . x) of the ones that the mask, or in its
 * place the predictor, lets through and, with ReLU, whose gate is above the threshold; 0 of the others, whose
 * ups are not read. */
typedef struct pi_gpu_neurons {
    pi_gpu_rows gate, up; /* of one shape */
    const float *x;
    const pi_gpu_norm *norm;           /* or NULL */
    const uint32_t *mask;              /* bit i % 32 of word i / 32; or NULL: all */
    const pi_gpu_predictor *predictor; /* or NULL */
    uint32_t activation;               /* PI_ACTIVATION_* */
    float threshold;
    uint64_t *n_masked, *n_active; /* added to: let through, and not 0; or both NULL */
    float *out;                    /* [n_rows] */
} pi_gpu_neurons;

/* The new tokens of a step, on the device. Token t is of row sequence[t] of the block table. */
typedef struct pi_gpu_step {
    uint32_t n_tokens;
    uint32_t table_stride;      /* pages of a row of the block table */
    const uint32_t *table;      /* [sequences of the step, table_stride] page of each 32 positions */
    const uint32_t *sequence;   /* [n_tokens] */
    const uint32_t *slot;       /* [n_tokens] place of the token in its sequence */
    const uint32_t *oldest;     /* [n_tokens] first position that it sees */
    const uint32_t *old_length; /* [n_tokens] tokens of its sequence before this step */
    const uint64_t *tree;       /* [n_tokens, tree_words] or NULL: bit j = it sees slot old_length + j */
    uint32_t tree_words;
    uint32_t most_pages; /* an upper bound of the pages that a token sees: sizes the launch only */
} pi_gpu_step;

/* KV pages of one layer: page p at base + p * page_bytes, KV head h of it at h * 2 * half_bytes:
 * K [head_dim, 32], then V [32, head_dim]. */
typedef struct pi_gpu_kv {
    uint8_t *base;
    uint64_t page_bytes;
    uint32_t half_precision; /* 1: float16, 0: float32 */
    uint32_t n_kv_heads;
    uint32_t head_dim;
} pi_gpu_kv;

/* Pairs (2 i, 2 i + 1) of a head's first n_rot dimensions are turned. */
typedef struct pi_gpu_rope {
    uint32_t n_heads;
    uint32_t n_rot;
    const float *cosine; /* [n_tokens, n_rot / 2] */
    const float *sine;   /* [n_tokens, n_rot / 2] */
} pi_gpu_rope;

typedef struct pi_gpu_attention {
    pi_gpu_kv kv;
    pi_gpu_step step;
    uint32_t n_heads;
    const float *q; /* [n_tokens, n_heads, head_dim] */
    float *out;     /* [n_tokens, n_heads, head_dim] */
    float *lse;     /* [n_tokens, n_heads] or NULL */
    /* [n_tiles, 2] first token and one beyond the last of at most 64 of one sequence; NULL: token by token */
    const uint32_t *tiles;
    uint32_t n_tiles;
} pi_gpu_attention;

#define PI_GPU_PACKET_WORDS 3u
#define PI_GPU_PACKET_ELEMENTS 6u
#define PI_GPU_MAX_VALUE 0xffffffu

/* What two sides hand each other through host memory. A packet is written and read as one access of 16 bytes,
 * at a multiple of 16: its words are there when its value is that of the exchange. Nothing else says so, and
 * no fence is needed. It holds three words of a mask, or six elements as integers of 16 bits times a power of
 * two of their own: 2^(step - 127), by which the largest of them takes 15 bits and a sign. What does not fit
 * by rounding up becomes 32767. So an element is off by at most 2^-14 of the largest of its six, whatever its
 * size; six of which one is not finite are handed over as six that are not (step 255). Of a token they lie
 * one after the other, from a packet of its own on. */
typedef struct pi_gpu_packet {
    uint32_t word[PI_GPU_PACKET_WORDS]; /* element i: bits [16 (i % 2), +16) of word[i / 2] */
    uint32_t tag;                       /* value << 8 | step; value 0: none yet; step 0: words of a mask */
} pi_gpu_packet;

/* Where packets for the CPU go; their value is *base + order. */
typedef struct pi_gpu_post {
    const uint32_t *base;
    uint32_t order;
    uint32_t out_stride; /* packets of a token's row */
    pi_gpu_packet *out;  /* host memory [n_tokens, out_stride]; NULL: nothing is posted */
    uint64_t *stamp;     /* host, or NULL: nanoseconds of the device's clock at the post */
} pi_gpu_post;

/* x [n_tokens, n_embd], normalised first with a norm, goes to the CPU. */
typedef struct pi_gpu_post_x {
    pi_gpu_post post;
    uint32_t n_tokens;
    uint32_t n_embd;
    const float *x;
    pi_gpu_norm norm; /* gain NULL: none; else out becomes what is posted */
} pi_gpu_post_x;

/* words [n_tokens, ceil(n / 32)]: bit i of a token = logits [n_tokens, n] >= threshold; or those of a single
 * token that the predictor names, and of the fields before words none. Of each token the words from
 * first_word on are posted. */
typedef struct pi_gpu_mask {
    const pi_gpu_predictor *predictor; /* or NULL */
    const float *logits;
    uint32_t n_tokens;
    uint32_t n;
    float threshold;
    uint32_t first_word;
    uint32_t *words;
    pi_gpu_post post;
} pi_gpu_mask;

/* y [n_tokens, n_embd] += shares + answer, whose packets get the value *base + order. Without an answer
 * nothing is waited for. When *abandoned is not 0, or limit_ns have passed (then *late becomes the value
 * waited for), what has not come is not added, and *given_up becomes 1, so that no later merge waits. gate,
 * abandoned, late and answer are host memory. */
typedef struct pi_gpu_merge {
    const uint32_t *base;
    uint32_t order;
    uint32_t n_tokens;
    uint32_t n_embd;
    const uint32_t *gate; /* before all that, the stream waits until it is not 0; or NULL */
    const uint32_t *abandoned;
    uint32_t *late;
    uint32_t *given_up; /* device memory, 0 before a step */
    uint64_t limit_ns;
    const float *share[2];       /* device memory, or NULL */
    const pi_gpu_packet *answer; /* [n_tokens, answer_stride], or NULL */
    uint64_t answer_stride;      /* packets */
    float *y;
    uint64_t *stamp; /* host, or NULL: nanoseconds of the device's clock after waiting */
} pi_gpu_merge;

typedef struct pi_gpu_api {
    uint32_t abi;               /* PI_GPU_ABI */
    const char *(*error)(void); /* of this thread's last failure */

    /* ---- device and memory ---- */
    int32_t (*count)(uint32_t *n_devices);
    /* budget_bytes: ceiling of context and allocations together; 0: what is free. PI_DOES_NOT_FIT where the
     * context alone exceeds it. */
    int32_t (*open)(uint32_t ordinal, uint64_t budget_bytes, pi_gpu **out);
    void (*close)(pi_gpu *);
    int32_t (*info)(pi_gpu *, pi_gpu_info *out);
    /* Scratch that operations take as they need it, from the start: afterwards none of these sizes takes
     * more. Transposed products and attention: partials; large products: activations as float16, and a tile
     * of rows. graphs_bytes of the budget are kept for graphs. */
    int32_t (*reserve)(pi_gpu *, uint64_t partials_bytes, uint64_t halves_bytes, uint64_t tile_bytes,
                       uint64_t graphs_bytes);
    /* PI_DOES_NOT_FIT above the budget; contents are undefined. */
    int32_t (*allocate)(pi_gpu *, uint64_t n_bytes, void **out);
    int32_t (*release)(pi_gpu *, void *data);
    int32_t (*upload)(pi_gpu *, const void *host, uint64_t n_bytes,
                      void *to); /* host may change afterwards */
    int32_t (*download)(pi_gpu *, const void *from, uint64_t n_bytes,
                        void *host); /* there after synchronize */
    int32_t (*copy)(pi_gpu *, const void *from, uint64_t n_bytes, void *to);
    int32_t (*zero)(pi_gpu *, void *data, uint64_t n_bytes);
    int32_t (*synchronize)(pi_gpu *);
    /* The rate at which a kernel reads n_bytes (whole MiB of it, allocated for the call) of the device's
     * memory, or of pinned host memory: of the fastest pass, of at least three and at least min_seconds. */
    int32_t (*measure_read)(pi_gpu *, uint32_t from_host, uint64_t n_bytes, float min_seconds,
                            uint64_t *bytes_per_second);

    /* ---- graphs ---- */
    /* From here to end_capture operations are recorded and not done, with the addresses and sizes that they
     * are given. Allocating, releasing, uploading, downloading and synchronizing fail meanwhile. */
    int32_t (*begin_capture)(pi_gpu *);
    /* What was recorded, ready to be launched; nothing of it has been done. out NULL: it is forgotten.
     * PI_DOES_NOT_FIT where graphs would take more than what was reserved for them. */
    int32_t (*end_capture)(pi_gpu *, pi_gpu_graph **out);
    int32_t (*launch_graph)(pi_gpu *, pi_gpu_graph *);
    /* Waits for the device first. Before close(). */
    int32_t (*release_graph)(pi_gpu *, pi_gpu_graph *);

    /* ---- matrices ---- */
    uint64_t (*row_stride)(uint32_t kernel_type, uint32_t n_cols); /* 0: this device has no kernels for it */
    /* host: n_rows rows as the file has them, row_bytes apart; rows->data: n_rows * row_stride bytes */
    int32_t (*upload_rows)(pi_gpu *, const void *host, uint64_t row_bytes, const pi_gpu_rows *rows);
    /* Pinned host memory on its way to the device, beside what is queued: bring() copies from slot 0 or 1 of
     * it to `raw` once the last take_apart() is done, and what is queued later waits for that. The slot may
     * change again after await_brought(). take_apart() is upload_rows() of what came. */
    int32_t (*bring)(pi_gpu *, uint32_t slot, const void *host, uint64_t n_bytes, void *raw);
    int32_t (*await_brought)(pi_gpu *, uint32_t slot);
    int32_t (*take_apart)(pi_gpu *, const void *raw, uint64_t row_bytes, const pi_gpu_rows *rows);
    /* out [n, n_cols] = rows tokens[i] */
    int32_t (*fetch_rows)(pi_gpu *, const pi_gpu_rows *, const int32_t *tokens, uint32_t n, float *out);
    /* At most PI_GPU_MAX_PRODUCTS products of one x [n_tokens, n_cols], normalised first with a norm. */
    int32_t (*multiply)(pi_gpu *, const pi_gpu_product *products, uint32_t n_products, const float *x,
                        uint32_t n_tokens, const pi_gpu_norm *norm);
    int32_t (*neurons)(pi_gpu *, const pi_gpu_neurons *);
    /* out [n_tokens, n_cols] (add: +)= h [n_tokens, n_rows] . rows; rows of zeros in h are not read for a few
     * tokens */
    int32_t (*multiply_transposed)(pi_gpu *, const pi_gpu_rows *, const float *h, uint32_t n_tokens,
                                   uint32_t add, float *out);

    /* ---- rows of activations ---- */
    int32_t (*gather)(pi_gpu *, const float *x, const uint32_t *rows, uint32_t n_rows, uint32_t n,
                      float *out);
    int32_t (*rms_norm)(pi_gpu *, const float *x, const float *gain, uint32_t n_rows, uint32_t n, float eps,
                        float *out);
    /* gate = act(gate) * up; relu: adds to *n_active the gates above the threshold */
    int32_t (*gated)(pi_gpu *, uint32_t activation, float threshold, const float *up, uint64_t n, float *gate,
                     uint64_t *n_active);
    int32_t (*log_probabilities)(pi_gpu *, const float *logits, uint32_t n_rows, uint32_t n_vocab,
                                 const int32_t *targets, float *out);
    /* out [n_rows, 2 n_top + 1]: the tokens of the n_top largest logits (at most PI_MAX_TOP), the largest
     * first, equal ones by token, NaN before all; then these logits, and last the log of the row's sum of
     * exp(logit - largest), logits as float32. Beyond n_vocab: UINT32_MAX and -inf. */
    int32_t (*top)(pi_gpu *, const float *logits, uint32_t n_rows, uint32_t n_vocab, uint32_t n_top,
                   uint32_t *out);

    /* Sets bit i % 64 of word i / 64 for each i < n whose activation is not 0. */
    int32_t (*record)(pi_gpu *, const float *activations, uint32_t n, uint64_t *words);

    /* ---- attention ---- */
    /* Turns q [n_tokens, n_heads, head_dim] by the angles; k [n_tokens, n_kv_heads, head_dim], turned, and v
     * go to the tokens' slots. */
    int32_t (*place_heads)(pi_gpu *, const pi_gpu_kv *, const pi_gpu_step *, const pi_gpu_rope *, float *q,
                           const float *k, const float *v);
    int32_t (*attend)(pi_gpu *, const pi_gpu_attention *);

    /* ---- predicted neurons ---- */
    int32_t (*mask)(pi_gpu *, const pi_gpu_mask *);

    /* gate [n_tokens, n] of neurons that a token's mask [n_tokens, mask_stride] does not let through becomes
     * -inf, which no threshold passes; adds the others to *n_masked */
    int32_t (*hide)(pi_gpu *, const uint32_t *mask, uint32_t mask_stride, uint32_t n_tokens, uint32_t n,
                    float *gate, uint64_t *n_masked);

    /* ---- layers that the CPU computes a share of ---- */
    /* Pinned host memory, and its address for operations. Not of the budget. */
    int32_t (*allocate_host)(pi_gpu *, uint64_t n_bytes, void **host, void **device);
    int32_t (*release_host)(pi_gpu *, void *host);
    /* Lets queued work begin; *busy: whether some of it is not done. Reports failures as synchronize() does.
     */
    int32_t (*query)(pi_gpu *, uint32_t *busy);
    /* *spin: kernels may wait long, since nothing ends them; *gate: the stream can wait by itself. */
    int32_t (*waits)(pi_gpu *, uint32_t *spin, uint32_t *gate);
    int32_t (*post)(pi_gpu *, const pi_gpu_post_x *);
    int32_t (*merge)(pi_gpu *, const pi_gpu_merge *);
    /* *at, host memory, becomes the device's clock once what is queued before is done. */
    int32_t (*stamp)(pi_gpu *, uint64_t *at);
} pi_gpu_api;

/* The library's one export; NULL where it was built for another version of this interface. */
typedef const pi_gpu_api *(*pi_gpu_api_get_fn)(uint32_t abi);

#ifdef __cplusplus
}
#endif
#endif
