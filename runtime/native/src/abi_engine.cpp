// abi_engine.cpp: pi.h's functions on engines, their KV cache and samplers.
#include "engine.h"
#include "sampler.h"
#include "status.h"

#include <algorithm>

namespace {

void draw(pi_sampler &sampler, const float *logits, uint32_t n_vocab, int32_t *token, float *logprob) {
    *token = sampler.sample(logits, n_vocab);
    if (logprob != nullptr)
        *logprob = pi::log_probability(logits, n_vocab, *token);
}

// Without tokens where all logits were wanted.
const pi::TopLogits &row_of(const pi::Results &results, uint32_t row) {
    if (row >= results.tops.size())
        pi::throw_usage("the last step has no such row of logits");
    return results.tops[row];
}

const float *whole_row(const pi::Results &results, uint32_t row, uint32_t n_vocab) {
    const auto begin = results.tops.begin();
    const auto before = std::count_if(begin, begin + row, [](const auto &top) { return top.tokens.empty(); });
    return results.logits.data() + static_cast<size_t>(before) * n_vocab;
}

} // namespace

pi_status pi_engine_create(pi_model *model, const pi_plan *plan, pi_engine **out) {
    return pi::guarded([&] {
        pi::require(out, "out");
        *out = nullptr;
        *out = new pi_engine(pi::require(model, "model"), pi::require(plan, "plan"));
    });
}

void pi_engine_free(pi_engine *engine) {
    delete engine;
}

pi_status pi_engine_set_abort(pi_engine *engine, pi_abort_fn callback, void *user) {
    return pi::guarded([&] { pi::require(engine, "engine").set_abort(callback, user); });
}

pi_status pi_engine_submit(pi_engine *engine, const pi_batch *batch, uint64_t *ticket) {
    return pi::guarded([&] {
        pi::require(ticket, "ticket") = pi::require(engine, "engine").submit(pi::require(batch, "batch"));
    });
}

pi_status pi_engine_wait(pi_engine *engine, uint64_t ticket, uint32_t timeout_ms, uint32_t *done) {
    return pi::guarded([&] {
        pi::require(done, "done") = 1; // also when the step failed
        *done = pi::require(engine, "engine").wait(ticket, timeout_ms) ? 1 : 0;
    });
}

pi_status pi_engine_abort(pi_engine *engine) {
    return pi::guarded([&] { pi::require(engine, "engine").abort(); });
}

pi_status pi_engine_logits(const pi_engine *engine, uint32_t *n_rows, const float **data) {
    return pi::guarded([&] {
        pi::require(engine, "engine").with_results([&](const pi::Results &results) {
            pi::require(n_rows, "n_rows") =
                static_cast<uint32_t>(results.logits.size() / engine->config().n_vocab);
            pi::require(data, "data") = results.logits.data();
        });
    });
}

pi_status pi_engine_top(const pi_engine *engine, uint32_t row, uint32_t *n, const int32_t **tokens,
                        const float **logits, float *log_sum) {
    return pi::guarded([&] {
        pi::require(engine, "engine").with_results([&](const pi::Results &results) {
            const pi::TopLogits &top = row_of(results, row);
            if (top.tokens.empty())
                pi::throw_usage("all logits of this row were wanted");
            pi::require(n, "n") = static_cast<uint32_t>(top.tokens.size());
            pi::require(tokens, "tokens") = top.tokens.data();
            pi::require(logits, "logits") = top.logits.data();
            pi::require(log_sum, "log_sum") = top.log_sum;
        });
    });
}

pi_status pi_engine_logprobs(const pi_engine *engine, uint32_t *n, const float **data) {
    return pi::guarded([&] {
        pi::require(engine, "engine").with_results([&](const pi::Results &results) {
            pi::require(n, "n") = static_cast<uint32_t>(results.logprobs.size());
            pi::require(data, "data") = results.logprobs.data();
        });
    });
}

pi_status pi_engine_set_recording(pi_engine *engine, uint32_t on) {
    return pi::guarded([&] { pi::require(engine, "engine").set_recording(on != 0); });
}

pi_status pi_engine_fired(const pi_engine *engine, uint32_t *n_tokens, uint32_t *n_words,
                          const uint64_t **data) {
    return pi::guarded([&] {
        pi::require(engine, "engine").with_results([&](const pi::Results &results) {
            if (results.fired.empty())
                pi::throw_usage("nothing was recorded: call pi_engine_set_recording first");
            pi::require(n_tokens, "n_tokens") = results.n_tokens;
            pi::require(n_words, "n_words") = (engine->config().n_ff + 63) / 64;
            pi::require(data, "data") = results.fired.data();
        });
    });
}

pi_status pi_engine_set_timing(pi_engine *engine, uint32_t on) {
    return pi::guarded([&] { pi::require(engine, "engine").set_timing(on != 0); });
}

pi_status pi_engine_layer_times(const pi_engine *engine, pi_layer_times *out) {
    return pi::guarded([&] {
        const std::vector<pi_layer_times> times = pi::require(engine, "engine").layer_times();
        std::copy(times.begin(), times.end(), &pi::require(out, "out"));
    });
}

pi_status pi_engine_stats(const pi_engine *engine, pi_stats *out) {
    return pi::guarded([&] {
        pi::require_size(pi::require(out, "out"), "stats");
        *out = pi::require(engine, "engine").stats();
    });
}

pi_status pi_engine_reset_stats(pi_engine *engine) {
    return pi::guarded([&] { pi::require(engine, "engine").reset_stats(); });
}

pi_status pi_kv_length(const pi_engine *engine, int32_t sequence, uint32_t *n_tokens) {
    return pi::guarded([&] {
        pi::require(n_tokens, "n_tokens") = pi::require(engine, "engine").with_cache([&](const auto &cache) {
            return cache.length(sequence);
        });
    });
}

pi_status pi_kv_truncate(pi_engine *engine, int32_t sequence, uint32_t n_tokens) {
    return pi::guarded([&] {
        pi::require(engine, "engine").with_cache([&](pi::KvCache &cache) {
            cache.truncate(sequence, n_tokens);
        });
    });
}

pi_status pi_kv_copy(pi_engine *engine, int32_t from, int32_t to) {
    return pi::guarded(
        [&] { pi::require(engine, "engine").with_cache([&](pi::KvCache &cache) { cache.copy(from, to); }); });
}

pi_status pi_kv_save(const pi_engine *engine, int32_t sequence, void *data, uint64_t *n_bytes) {
    return pi::guarded([&] {
        pi::require(engine, "engine").with_cache([&](const pi::KvCache &cache) {
            const uint64_t needed = cache.saved_bytes(sequence);
            if (data != nullptr) {
                if (pi::require(n_bytes, "n_bytes") < needed)
                    pi::throw_usage("the buffer is too small for the sequence");
                cache.save(sequence, static_cast<uint8_t *>(data));
            }
            pi::require(n_bytes, "n_bytes") = needed;
        });
    });
}

pi_status pi_kv_load(pi_engine *engine, int32_t sequence, const void *data, uint64_t n_bytes) {
    return pi::guarded([&] {
        const auto *bytes = static_cast<const uint8_t *>(data);
        if (bytes == nullptr)
            pi::throw_usage("data is NULL");
        pi::require(engine, "engine").with_cache([&](pi::KvCache &cache) {
            cache.load(sequence, bytes, n_bytes);
        });
    });
}

pi_status pi_sampler_create(const pi_sampler_params *params, pi_sampler **out) {
    return pi::guarded([&] {
        pi::require(out, "out");
        *out = nullptr;
        *out = new pi_sampler(pi::require(params, "params"));
    });
}

void pi_sampler_free(pi_sampler *sampler) {
    delete sampler;
}

pi_status pi_sampler_accept(pi_sampler *sampler, int32_t token) {
    return pi::guarded([&] { pi::require(sampler, "sampler").accept(token); });
}

pi_status pi_sampler_top(const pi_sampler *sampler, uint32_t *n_top) {
    return pi::guarded([&] { pi::require(n_top, "n_top") = pi::require(sampler, "sampler").n_top(); });
}

pi_status pi_sampler_sample_logits(pi_sampler *sampler, const float *logits, uint32_t n_vocab, int32_t *token,
                                   float *logprob) {
    return pi::guarded([&] {
        pi::require(logits, "logits");
        pi::require(token, "token");
        draw(pi::require(sampler, "sampler"), logits, n_vocab, token, logprob);
    });
}

pi_status pi_sampler_sample(pi_sampler *sampler, const pi_engine *engine, uint32_t row, int32_t *token,
                            float *logprob) {
    return pi::guarded([&] {
        pi::require(sampler, "sampler");
        pi::require(token, "token");
        pi::require(engine, "engine").with_results([&](const pi::Results &results) {
            const uint32_t n_vocab = engine->config().n_vocab;
            const pi::TopLogits &top = row_of(results, row);
            if (top.tokens.empty())
                return draw(*sampler, whole_row(results, row, n_vocab), n_vocab, token, logprob);
            *token = sampler->sample(top, n_vocab);
            if (logprob != nullptr)
                *logprob = pi::log_probability(top, *token);
        });
    });
}
