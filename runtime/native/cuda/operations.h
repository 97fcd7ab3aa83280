// operations.h: the functions of pi_gpu_api, each in the file of its family.
#pragma once

#include "pi_gpu.h"

namespace pi_cuda {

const char *error_text();
int32_t count_devices(uint32_t *n_devices);
int32_t open(uint32_t ordinal, uint64_t budget_bytes, pi_gpu **out);
void close(pi_gpu *);
int32_t info(pi_gpu *, pi_gpu_info *out);
int32_t reserve(pi_gpu *, uint64_t partials_bytes, uint64_t halves_bytes, uint64_t tile_bytes,
                uint64_t graphs_bytes);
int32_t allocate(pi_gpu *, uint64_t n_bytes, void **out);
int32_t release(pi_gpu *, void *data);
int32_t upload(pi_gpu *, const void *host, uint64_t n_bytes, void *to);
int32_t download(pi_gpu *, const void *from, uint64_t n_bytes, void *host);
int32_t copy(pi_gpu *, const void *from, uint64_t n_bytes, void *to);
int32_t zero(pi_gpu *, void *data, uint64_t n_bytes);
int32_t synchronize(pi_gpu *);
int32_t measure_read(pi_gpu *, uint32_t from_host, uint64_t n_bytes, float min_seconds,
                     uint64_t *bytes_per_second);
int32_t begin_capture(pi_gpu *);
int32_t end_capture(pi_gpu *, pi_gpu_graph **out);
int32_t launch_graph(pi_gpu *, pi_gpu_graph *);
int32_t release_graph(pi_gpu *, pi_gpu_graph *);
uint64_t row_stride(uint32_t kernel_type, uint32_t n_cols);
int32_t upload_rows(pi_gpu *, const void *host, uint64_t row_bytes, const pi_gpu_rows *rows);
int32_t bring(pi_gpu *, uint32_t slot, const void *host, uint64_t n_bytes, void *raw);
int32_t await_brought(pi_gpu *, uint32_t slot);
int32_t take_apart(pi_gpu *, const void *raw, uint64_t row_bytes, const pi_gpu_rows *rows);
int32_t fetch_rows(pi_gpu *, const pi_gpu_rows *, const int32_t *tokens, uint32_t n, float *out);
int32_t multiply(pi_gpu *, const pi_gpu_product *products, uint32_t n_products, const float *x,
                 uint32_t n_tokens, const pi_gpu_norm *norm);
int32_t neurons(pi_gpu *, const pi_gpu_neurons *);
int32_t multiply_transposed(pi_gpu *, const pi_gpu_rows *, const float *h, uint32_t n_tokens, uint32_t add,
                            float *out);
int32_t gather(pi_gpu *, const float *x, const uint32_t *rows, uint32_t n_rows, uint32_t n, float *out);
int32_t rms_norm(pi_gpu *, const float *x, const float *gain, uint32_t n_rows, uint32_t n, float eps,
                 float *out);
int32_t gated(pi_gpu *, uint32_t activation, float threshold, const float *up, uint64_t n, float *gate,
              uint64_t *n_active);
int32_t log_probabilities(pi_gpu *, const float *logits, uint32_t n_rows, uint32_t n_vocab,
                          const int32_t *targets, float *out);
int32_t top(pi_gpu *, const float *logits, uint32_t n_rows, uint32_t n_vocab, uint32_t n_top, uint32_t *out);
int32_t record(pi_gpu *, const float *activations, uint32_t n, uint64_t *words);
int32_t place_heads(pi_gpu *, const pi_gpu_kv *, const pi_gpu_step *, const pi_gpu_rope *, float *q,
                    const float *k, const float *v);
int32_t attend(pi_gpu *, const pi_gpu_attention *);
int32_t mask(pi_gpu *, const pi_gpu_mask *);
int32_t hide(pi_gpu *, const uint32_t *mask, uint32_t mask_stride, uint32_t n_tokens, uint32_t n, float *gate,
             uint64_t *n_masked);
int32_t allocate_host(pi_gpu *, uint64_t n_bytes, void **host, void **device);
int32_t release_host(pi_gpu *, void *host);
int32_t query(pi_gpu *, uint32_t *busy);
int32_t waits(pi_gpu *, uint32_t *spin, uint32_t *gate);
int32_t post(pi_gpu *, const pi_gpu_post_x *);
int32_t merge(pi_gpu *, const pi_gpu_merge *);
int32_t stamp(pi_gpu *, uint64_t *at);

} // namespace pi_cuda
