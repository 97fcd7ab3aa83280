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

Side &Forward::begin(const Step &step, Results &results) const {
    results.n_tokens = step.n_tokens();
    results.fired.assign(record_fired ? step.n_tokens() * model.config.n_layers * fired_words() : 0, 0);
    for (Side *side : {sides.cpu, sides.gpu}) {
        if (side != nullptr)
            side->ops.begin_step(side->stream, cache, step);
    }
    rope_angles(step);
    Side &side = step.tokens.empty() ? sides.of_layer(0) : sides.of_embedding();
    if (step.tokens.empty()) {
        side.ops.upload(side.stream, step.embeddings.data(), step.embeddings.size(), side.buffers.residual);
    } else {
        side.ops.embed(side.stream, model.weights.embedding, step.tokens.data(), step.n_tokens(),
                       side.buffers.residual);
    }
    return side;
}

Side &Forward::hand_over(Side &from, Side &to, const Step &step) const {
    if (&from == &to)
        return to;
    const uint64_t n = uint64_t{step.n_tokens()} * model.config.n_embd;
    if (&from == sides.gpu) {
        from.ops.download(from.stream, from.buffers.residual, n, to.buffers.residual);
        from.ops.synchronize(from.stream);
    } else {
        from.ops.synchronize(from.stream);
        to.ops.upload(to.stream, from.buffers.residual, n, to.buffers.residual);
    }
    return to;
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
    for (Side *side : {sides.cpu, sides.gpu}) {
        if (side == nullptr)
            continue;
        side->ops.upload(side->stream, cosine.data(), cosine.size(), side->buffers.cosine);
        side->ops.upload(side->stream, sine.data(), sine.size(), side->buffers.sine);
    }
}

void Forward::attention(Side &side, const Step &step, uint32_t layer) const {
    const ModelConfig &config = model.config;
    const LayerWeights &weights = model.weights.layers[layer];
    const uint32_t n = step.n_tokens();
    side.ops.rms_norm(side.stream, side.buffers.residual, weights.attn_norm, n, config.n_embd, config.rms_eps,
                      side.buffers.normed);
    const Product inputs[] = {whole(weights.q, weights.q_bias, side.buffers.q),
                              whole(weights.k, weights.k_bias, side.buffers.k),
                              whole(weights.v, weights.v_bias, side.buffers.v)};
    side.ops.matmul(side.stream, {inputs, 3}, side.buffers.normed, step.positions.data(), n);
    side.ops.rope(side.stream, side.buffers.q, n, config.n_heads, config, side.buffers.cosine,
                  side.buffers.sine);
    side.ops.rope(side.stream, side.buffers.k, n, config.n_kv_heads, config, side.buffers.cosine,
                  side.buffers.sine);
    side.ops.store_kv(side.stream, cache, step, layer, side.buffers.k, side.buffers.v);
    side.ops.attend(side.stream,
                    {&config, &cache, &step, layer, side.buffers.q, side.buffers.attended, nullptr});
    const Product output = whole(weights.attn_output, weights.attn_output_bias, side.buffers.block);
    side.ops.matmul(side.stream, {&output, 1}, side.buffers.attended, step.positions.data(), n);
    side.ops.add(side.stream, side.buffers.block, uint64_t{n} * config.n_embd, side.buffers.residual);
}

void Forward::ffn(Side &side, const Step &step, uint32_t layer, const uint8_t *modes, FfnCounts &counts,
                  Results &results) const {
    const ModelConfig &config = model.config;
    const LayerWeights &weights = model.weights.layers[layer];
    const uint32_t n = step.n_tokens();
    side.ops.rms_norm(side.stream, side.buffers.residual, weights.ffn_norm, n, config.n_embd, config.rms_eps,
                      side.buffers.normed);
    FfnArgs args{};
    args.config = &config;
    args.layer = &weights;
    args.neuron_end = config.n_ff;
    args.n_tokens = n;
    args.modes = modes;
    args.positions = step.positions.data();
    args.sparse_threshold = plan.sparse_threshold;
    args.normed = side.buffers.normed;
    args.residual = side.buffers.residual;
    args.out = side.buffers.block;
    args.counts = &counts;
    args.fired = results.fired.empty() ? nullptr : results.fired.data() + layer * fired_words();
    args.fired_stride = config.n_layers * fired_words();
    side.ops.ffn(side.stream, args);
    side.ops.add(side.stream, side.buffers.block, uint64_t{n} * config.n_embd, side.buffers.residual);
}

// Logits of the given tokens, a few rows at a time: a long scored text never needs all of them at once.
void Forward::head(Side &side, const std::vector<uint32_t> &rows, const Step &step, Results &results) const {
    const ModelConfig &config = model.config;
    const uint32_t rows_each = std::min(plan.max_batch_tokens, Buffers::logit_rows);
    for (size_t begin = 0; begin < rows.size(); begin += rows_each) {
        const auto n = static_cast<uint32_t>(std::min<size_t>(rows_each, rows.size() - begin));
        side.ops.gather(side.stream, side.buffers.residual, rows.data() + begin, n, config.n_embd,
                        side.buffers.block);
        side.ops.rms_norm(side.stream, side.buffers.block, model.weights.output_norm, n, config.n_embd,
                          config.rms_eps, side.buffers.normed);
        const Product product = whole(model.weights.head, nullptr, side.buffers.logits);
        side.ops.matmul(side.stream, {&product, 1}, side.buffers.normed, nullptr, n);
        read_rows(side, {rows.data() + begin, n}, step, results);
    }
}

// Moves what the caller asked of the computed rows to the results: whole rows, or one number each.
void Forward::read_rows(Side &side, std::span<const uint32_t> rows, const Step &step,
                        Results &results) const {
    const uint64_t n_vocab = model.config.n_vocab;
    std::vector<int32_t> targets;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (!step.targets.empty())
            targets.push_back(step.targets[rows[i]]);
        if (!std::binary_search(step.wanted.begin(), step.wanted.end(), rows[i]))
            continue;
        results.logits.resize(results.logits.size() + n_vocab);
        side.ops.download(side.stream, side.buffers.logits + i * n_vocab, n_vocab,
                          &results.logits[results.logits.size() - n_vocab]);
        side.ops.synchronize(side.stream); // the next row may move the results
    }
    if (targets.empty())
        return;
    std::vector<float> logprobs(rows.size());
    side.ops.log_probabilities(side.stream, side.buffers.logits, static_cast<uint32_t>(rows.size()),
                               model.config.n_vocab, targets.data(), logprobs.data());
    side.ops.synchronize(side.stream);
    for (size_t i = 0; i < rows.size(); ++i)
        results.logprobs[rows[i]] = logprobs[i];
}

void Forward::finish(Side &side, const Step &step, Results &results) const {
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
    head(side, rows, step, results);
}

} // namespace pi
