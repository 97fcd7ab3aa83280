#include "forward.h"

#include "status.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pi {

Buffers::Buffers(const Ops &ops, Stream &stream, const ModelConfig &config, uint32_t max_tokens)
    : ops_(ops), stream_(stream) {
    const uint64_t n = max_tokens;
    residual = take(n * config.n_embd);
    normed = take(n * config.n_embd);
    q = take(n * config.n_embd_q());
    k = take(n * config.n_embd_kv());
    v = take(n * config.n_embd_kv());
    attended = take(n * config.n_embd_q());
    block = take(n * config.n_embd);
    cosine = take(n * config.n_rot / 2);
    sine = take(n * config.n_rot / 2);
    logits = take(uint64_t{std::min(max_tokens, logit_rows)} * config.n_vocab);
}

Buffers::~Buffers() {
    for (float *data : owned_)
        ops_.release(stream_, data);
}

float *Buffers::take(uint64_t n_floats) {
    owned_.reserve(owned_.size() + 1);
    owned_.push_back(ops_.allocate(stream_, n_floats));
    n_floats_ += n_floats;
    return owned_.back();
}

void Forward::throw_interrupted() {
    throw Error(PI_INTERRUPTED, "interrupted");
}

std::vector<uint8_t> Forward::ffn_modes(const Step &step, bool exact_layer) const {
    const auto tier_mode = static_cast<uint8_t>(plan.ffn_mode(step.n_tokens()));
    const auto decode_mode = static_cast<uint8_t>(plan.ffn_mode(1));
    std::vector<uint8_t> modes(step.n_tokens(), tier_mode);
    if (decode_mode != PI_FFN_PREDICTED)
        return modes;
    for (uint32_t i = 0; i < step.n_tokens(); ++i) {
        if (plan.predict_all) {
            modes[i] = PI_FFN_PREDICTED;
            continue;
        }
        // The first positions are attention sinks: a mask there costs more than everything else together.
        const bool sink = step.positions[i] < model.config.sink_positions;
        const bool masked = step.rules[i] == PI_RULE_PREDICT ||
                            (step.rules[i] == PI_RULE_AUTO && tier_mode == PI_FFN_PREDICTED);
        modes[i] = masked && !sink && !exact_layer ? PI_FFN_PREDICTED : PI_FFN_EXACT;
    }
    return modes;
}

void Forward::begin(const Step &step, Results &results) const {
    results.n_tokens = step.n_tokens();
    results.fired.assign(record_fired ? step.n_tokens() * model.config.n_layers * fired_words() : 0, 0);
    if (step.tokens.empty()) {
        ops.upload(stream, step.embeddings.data(), step.embeddings.size(), buffers.residual);
    } else {
        ops.embed(stream, model.weights.embedding, step.tokens.data(), step.n_tokens(), buffers.residual);
    }
    rope_angles(step);
}

// Angles in float32, as the reference implementation forms them: position * (1 / theta^(2i / n_rot)).
void Forward::rope_angles(const Step &step) const {
    const ModelConfig &config = model.config;
    const uint32_t pairs = config.n_rot / 2;
    const float *factors = model.weights.rope_factors;
    std::vector<float> cosine(size_t{step.n_tokens()} * pairs);
    std::vector<float> sine(cosine.size());
    for (uint32_t i = 0; i < pairs; ++i) {
        const double exponent = 2.0 * i / config.n_rot;
        auto frequency = static_cast<float>(std::pow(static_cast<double>(config.rope_theta), -exponent));
        frequency *= config.rope_scale;
        if (factors != nullptr)
            frequency /= factors[i];
        for (uint32_t token = 0; token < step.n_tokens(); ++token) {
            const double angle = static_cast<float>(step.positions[token]) * frequency;
            cosine[token * pairs + i] = static_cast<float>(std::cos(angle));
            sine[token * pairs + i] = static_cast<float>(std::sin(angle));
        }
    }
    ops.upload(stream, cosine.data(), cosine.size(), buffers.cosine);
    ops.upload(stream, sine.data(), sine.size(), buffers.sine);
}

void Forward::attention(const Step &step, uint32_t layer) const {
    const ModelConfig &config = model.config;
    const LayerWeights &weights = model.weights.layers[layer];
    const uint32_t n = step.n_tokens();
    ops.rms_norm(stream, buffers.residual, weights.attn_norm, n, config.n_embd, config.rms_eps,
                 buffers.normed);
    const Product inputs[] = {whole(weights.q, weights.q_bias, buffers.q),
                              whole(weights.k, weights.k_bias, buffers.k),
                              whole(weights.v, weights.v_bias, buffers.v)};
    ops.matmul(stream, {inputs, 3}, buffers.normed, step.positions.data(), n);
    ops.rope(stream, buffers.q, n, config.n_heads, config, buffers.cosine, buffers.sine);
    ops.rope(stream, buffers.k, n, config.n_kv_heads, config, buffers.cosine, buffers.sine);
    ops.store_kv(stream, cache, step, layer, buffers.k, buffers.v);
    ops.attend(stream, {&config, &cache, &step, layer, buffers.q, buffers.attended, nullptr});
    const Product output = whole(weights.attn_output, weights.attn_output_bias, buffers.block);
    ops.matmul(stream, {&output, 1}, buffers.attended, step.positions.data(), n);
    ops.add(stream, buffers.block, uint64_t{n} * config.n_embd, buffers.residual);
}

void Forward::ffn(const Step &step, uint32_t layer, const uint8_t *modes, FfnCounts &counts,
                  Results &results) const {
    const ModelConfig &config = model.config;
    const LayerWeights &weights = model.weights.layers[layer];
    const uint32_t n = step.n_tokens();
    ops.rms_norm(stream, buffers.residual, weights.ffn_norm, n, config.n_embd, config.rms_eps,
                 buffers.normed);
    FfnArgs args{};
    args.config = &config;
    args.layer = &weights;
    args.neuron_end = config.n_ff;
    args.n_tokens = n;
    args.modes = modes;
    args.positions = step.positions.data();
    args.sparse_threshold = plan.sparse_threshold;
    args.normed = buffers.normed;
    args.residual = buffers.residual;
    args.out = buffers.block;
    args.counts = &counts;
    args.fired = results.fired.empty() ? nullptr : results.fired.data() + layer * fired_words();
    args.fired_stride = config.n_layers * fired_words();
    ops.ffn(stream, args);
    ops.add(stream, buffers.block, uint64_t{n} * config.n_embd, buffers.residual);
}

// Logits of the given tokens, a few rows at a time: a long scored text never needs all of them at once.
void Forward::head(const std::vector<uint32_t> &rows, const Step &step, Results &results) const {
    const ModelConfig &config = model.config;
    const uint32_t rows_each = std::min(plan.max_batch_tokens, Buffers::logit_rows);
    for (size_t begin = 0; begin < rows.size(); begin += rows_each) {
        const auto n = static_cast<uint32_t>(std::min<size_t>(rows_each, rows.size() - begin));
        ops.gather(stream, buffers.residual, rows.data() + begin, n, config.n_embd, buffers.block);
        ops.rms_norm(stream, buffers.block, model.weights.output_norm, n, config.n_embd, config.rms_eps,
                     buffers.normed);
        const Product product = whole(model.weights.head, nullptr, buffers.logits);
        ops.matmul(stream, {&product, 1}, buffers.normed, nullptr, n);
        read_rows({rows.data() + begin, n}, step, results);
    }
}

// Moves what the caller asked of the computed rows to the results: whole rows, or one number each.
void Forward::read_rows(std::span<const uint32_t> rows, const Step &step, Results &results) const {
    const uint64_t n_vocab = model.config.n_vocab;
    std::vector<int32_t> targets;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (!step.targets.empty())
            targets.push_back(step.targets[rows[i]]);
        if (!std::binary_search(step.wanted.begin(), step.wanted.end(), rows[i]))
            continue;
        results.logits.resize(results.logits.size() + n_vocab);
        ops.download(stream, buffers.logits + i * n_vocab, n_vocab,
                     &results.logits[results.logits.size() - n_vocab]);
        ops.synchronize(stream); // the next row may move the results
    }
    if (targets.empty())
        return;
    std::vector<float> logprobs(rows.size());
    ops.log_probabilities(stream, buffers.logits, static_cast<uint32_t>(rows.size()), model.config.n_vocab,
                          targets.data(), logprobs.data());
    ops.synchronize(stream);
    for (size_t i = 0; i < rows.size(); ++i)
        results.logprobs[rows[i]] = logprobs[i];
}

void Forward::finish(const Step &step, Results &results) const {
    results.logits.clear();
    results.logits.reserve(step.wanted.size() *
                           uint64_t{model.config.n_vocab}); // what the plan counts, no more
    results.logprobs.assign(step.targets.size(), std::numeric_limits<float>::quiet_NaN());
    std::vector<uint32_t> rows = step.wanted;
    for (uint32_t i = 0; i < step.targets.size(); ++i) {
        if (step.targets[i] >= 0)
            rows.push_back(i);
    }
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    head(rows, step, results);
}

} // namespace pi
