#include "forward.h"

#include "gpu/cold_weights.h"
#include "gpu/handover.h"
#include "status.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pi {
namespace {

// Of a step that is worth a graph: larger ones do not wait for launches.
constexpr uint32_t graph_tokens = Plan::few_tokens;

bool are_neighbours(std::span<const uint32_t> rows) {
    return !rows.empty() && rows.back() - rows.front() + 1 == rows.size();
}

} // namespace

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
    logits = take(uint64_t{std::min(max_tokens, logit_rows)} * config.n_vocab);
    top = take(std::min(max_tokens, logit_rows) * top_words(PI_MAX_TOP));
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

Side &Forward::begin(const Pass &pass) const {
    const Step &step = pass.step;
    pass.results.n_tokens = step.n_tokens();
    pass.results.fired.assign(record_fired ? step.n_tokens() * model.config.n_layers * fired_words() : 0, 0);
    for (Side *side : {sides.cpu, sides.gpu}) {
        if (side != nullptr)
            side->ops.begin_step(side->stream, cache, step, pass.angles);
    }
    if (sides.hand_over != nullptr && sides.cpu != nullptr)
        sides.cpu->ops.expect_shares(sides.cpu->stream,
                                     step.n_tokens() <= graph_tokens || is_streamed(step.n_tokens()));
    Side &side = of_part(first_part(step));
    if (step.tokens.empty())
        side.ops.upload(side.stream, step.embeddings.data(), step.embeddings.size(), side.buffers.residual);
    return side;
}

Side &Forward::of_part(uint32_t part) const {
    if (part == 0)
        return sides.of_embedding();
    return part <= model.config.n_layers ? sides.of_layer(part - 1) : sides.of_head();
}

bool Forward::is_split(uint32_t part) const {
    return part > 0 && part <= model.config.n_layers &&
           sides.placement.layers[part - 1].kind == LayerKind::split;
}

bool Forward::needs_answer(uint32_t part) const {
    return is_split(part) && sides.placement.layers[part - 1].n_pull < model.config.n_ff;
}

void Forward::queue(Side &side, uint32_t part, const Pass &pass, Answers answers) const {
    if (part == 0)
        return side.ops.embed(side.stream, model.weights.embedding, pass.step, side.buffers.residual);
    if (part > model.config.n_layers)
        return head(side, pass.step, 0);
    side.ops.mark(side.stream, part - 1, Moment::begin);
    attention(side, pass.step, part - 1);
    if (is_split(part))
        return split_ffn(side, pass, part - 1, answers);
    ffn(side, pass, part - 1);
    side.ops.mark(side.stream, part - 1, Moment::end);
}

void Forward::answer(uint32_t part, uint32_t end, const Pass &pass) const {
    for (; part < end; ++part) {
        if (needs_answer(part))
            cold_ffn(pass, part - 1);
    }
}

uint32_t Forward::end_of_graph(uint32_t part, const Pass &pass) const {
    const Side &side = of_part(part);
    const bool recordable = side.ops.begin_graph != nullptr && pass.step.n_tokens() <= graph_tokens &&
                            !record_fired && !pass.step.has_tree();
    const auto queued_ahead = [&](uint32_t i) { return !needs_answer(i) || sides.hand_over->queues_ahead(); };
    uint32_t end = part;
    while (recordable && end < n_parts() && &of_part(end) == &side && queued_ahead(end))
        ++end;
    return end;
}

void Forward::in_graph(Side &side, uint32_t part, uint32_t end, const Pass &pass) const {
    const std::vector<uint32_t> &rows = pass.step.rows;
    GraphKey key = {part,
                    end,
                    pass.step.n_tokens(),
                    static_cast<uint32_t>(rows.size()),
                    are_neighbours(rows) ? rows.front() : UINT32_MAX,
                    pass.step.n_top};
    for (uint32_t t = 0; t < pass.step.n_tokens(); ++t)
        key.push_back(uint32_t{pass.modes[t]} << 8 | pass.exact_layer_modes[t]);
    const auto queue_parts = [&](Answers answers) {
        for (uint32_t i = part; i < end; ++i)
            queue(side, i, pass, answers);
    };
    const Graph graph = side.ops.begin_graph(side.stream, key, pass.counts);
    if (graph == Graph::replayed)
        return answer(part, end, pass);
    if (graph == Graph::none)
        return queue_parts(Answers::at_once);
    try {
        queue_parts(Answers::later);
    } catch (...) {
        side.ops.abandon_graph(side.stream);
        throw;
    }
    if (side.ops.end_graph(side.stream, pass.counts))
        answer(part, end, pass);
    else
        queue_parts(Answers::at_once);
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
RopeAngles Forward::rope_angles(const Step &step) const {
    const ModelConfig &config = model.config;
    const uint32_t pairs = config.n_rot / 2;
    const float *factors = model.weights.rope_factors;
    const size_t n = size_t{step.n_tokens()} * pairs;
    RopeAngles angles{std::vector<float>(n), std::vector<float>(n)};
    for (uint32_t i = 0; i < pairs; ++i) {
        const double exponent = 2.0 * i / config.n_rot;
        auto frequency = static_cast<float>(std::pow(static_cast<double>(config.rope_theta), -exponent));
        frequency *= config.rope_scale;
        if (factors != nullptr)
            frequency /= factors[i];
        for (uint32_t token = 0; token < step.n_tokens(); ++token) {
            const double angle = static_cast<float>(step.positions[token]) * frequency;
            angles.cosine[token * pairs + i] = static_cast<float>(std::cos(angle));
            angles.sine[token * pairs + i] = static_cast<float>(std::sin(angle));
        }
    }
    return angles;
}

void Forward::attention(Side &side, const Step &step, uint32_t layer) const {
    const ModelConfig &config = model.config;
    const LayerWeights &weights = model.weights.layers[layer];
    const Buffers &buffers = side.buffers;
    const uint32_t n = step.n_tokens();
    const InputNorm norm = {weights.attn_norm, config.rms_eps, buffers.normed};
    const Product inputs[] = {whole(weights.q, weights.q_bias, buffers.q),
                              whole(weights.k, weights.k_bias, buffers.k),
                              whole(weights.v, weights.v_bias, buffers.v)};
    side.ops.matmul(side.stream, {inputs, 3}, buffers.residual, &norm, step.positions.data(), n);
    const AttentionArgs args = {&config,   &cache,           &step,   layer,
                                buffers.q, buffers.attended, nullptr, weights.q.type->int8_activations};
    side.ops.place_heads(side.stream, args, buffers.q, buffers.k, buffers.v);
    side.ops.attend(side.stream, args);
    const Product output = whole(weights.attn_output, weights.attn_output_bias, buffers.residual, true);
    side.ops.matmul(side.stream, {&output, 1}, buffers.attended, nullptr, step.positions.data(), n);
}

bool Forward::is_exact(uint32_t layer) const {
    const bool split = sides.placement.layers[layer].kind == LayerKind::split;
    return model.config.is_exact_layer(layer) || (plan.predict_split_only && !split);
}

FfnArgs Forward::ffn_args(const Side &side, const Pass &pass, uint32_t layer) const {
    const ModelConfig &config = model.config;
    FfnArgs args{};
    args.config = &config;
    args.layer = &model.weights.layers[layer];
    args.neuron_end = config.n_ff;
    args.n_tokens = pass.step.n_tokens();
    args.modes = (is_exact(layer) ? pass.exact_layer_modes : pass.modes).data();
    args.positions = pass.step.positions.data();
    args.sparse_threshold = plan.sparse_threshold;
    args.normed = side.buffers.normed;
    args.residual = side.buffers.residual;
    args.out = side.buffers.block;
    args.counts = &pass.counts;
    args.fired = pass.results.fired.empty() ? nullptr : pass.results.fired.data() + layer * fired_words();
    args.fired_stride = config.n_layers * fired_words();
    return args;
}

void Forward::ffn(Side &side, const Pass &pass, uint32_t layer) const {
    const InputNorm norm = {model.weights.layers[layer].ffn_norm, model.config.rms_eps, side.buffers.normed};
    FfnArgs args = ffn_args(side, pass, layer);
    args.norm = &norm;
    args.add_to = side.buffers.residual;
    side.ops.ffn(side.stream, args);
}

void Forward::split_ffn(Side &side, const Pass &pass, uint32_t layer, Answers answers) const {
    const InputNorm norm = {model.weights.layers[layer].ffn_norm, model.config.rms_eps, side.buffers.normed};
    FfnArgs args = ffn_args(side, pass, layer);
    args.norm = &norm;
    if (needs_answer(layer + 1) && is_streamed(args.n_tokens)) {
        args.add_to = side.buffers.residual;
        return sides.cold_weights->queue_layer(args, layer, on_threads());
    }
    sides.hand_over->queue_shares(args, layer);
    if (answers == Answers::at_once && needs_answer(layer + 1))
        cold_ffn(pass, layer);
    sides.hand_over->queue_merge(args, layer, side.buffers.residual);
}

void Forward::cold_ffn(const Pass &pass, uint32_t layer) const {
    FfnArgs args = ffn_args(*sides.cpu, pass, layer);
    const Posted posted = sides.hand_over->await(args, layer, on_threads(), pass.check_interrupted);
    args.neuron_begin = sides.placement.layers[layer].n_pull;
    args.normed = posted.normed;
    args.mask = posted.mask;
    args.mask_stride = posted.mask_stride;
    args.await_masks = posted.await_masks ? &posted.await_masks : nullptr;
    args.out = posted.out;
    args.deliver = posted.deliver;
    sides.cpu->ops.ffn(sides.cpu->stream, args);
    sides.hand_over->finish_answer(layer);
}

bool Forward::is_streamed(uint32_t n_tokens) const {
    return sides.cold_weights != nullptr && sides.cold_weights->serves(n_tokens);
}

OnThreads Forward::on_threads() const {
    return [&cpu = *sides.cpu](const auto &task) { cpu.ops.on_threads(cpu.stream, task); };
}

void Forward::require_answered() const {
    if (sides.hand_over != nullptr)
        sides.hand_over->require_answered();
}

void Forward::head(Side &side, const Step &step, uint32_t begin) const {
    const ModelConfig &config = model.config;
    if (begin >= step.rows.size())
        return;
    const auto n = std::min(rows_each(), static_cast<uint32_t>(step.rows.size()) - begin);
    const float *rows = side.buffers.residual + uint64_t{step.rows[begin]} * config.n_embd;
    if (!are_neighbours({step.rows.data() + begin, n})) {
        side.ops.gather(side.stream, step, side.buffers.residual, begin, n, config.n_embd,
                        side.buffers.block);
        rows = side.buffers.block;
    }
    const InputNorm norm = {model.weights.output_norm, config.rms_eps, side.buffers.normed};
    const Product product = whole(model.weights.head, nullptr, side.buffers.logits);
    side.ops.matmul(side.stream, {&product, 1}, rows, &norm, nullptr, n);
    if (step.n_top > 0)
        side.ops.top(side.stream, side.buffers.logits, n, config.n_vocab, step.n_top, side.buffers.top);
}

std::vector<float> Forward::queue_logits(Side &side, std::span<const uint32_t> rows, const Pass &pass) const {
    const Step &step = pass.step;
    std::vector<float> &logits = pass.results.logits;
    const uint64_t n_vocab = model.config.n_vocab;
    for (size_t i = 0; i < rows.size(); ++i) {
        const auto found = std::lower_bound(step.wanted.begin(), step.wanted.end(), rows[i]);
        const auto at = static_cast<size_t>(found - step.wanted.begin());
        if (found == step.wanted.end() || *found != rows[i] || step.tops[at] != 0)
            continue;
        logits.resize(logits.size() + n_vocab); // there is room: nothing moves
        side.ops.download(side.stream, side.buffers.logits + i * n_vocab, n_vocab,
                          &logits[logits.size() - n_vocab]);
    }
    std::vector<float> top(step.n_top == 0 ? 0 : rows.size() * top_words(step.n_top));
    if (!top.empty())
        side.ops.download(side.stream, side.buffers.top, top.size(), top.data());
    return top;
}

// Moves what the caller asked of the computed rows to the results: whole rows, their largest logits, or one
// number each.
void Forward::read_rows(Side &side, std::span<const uint32_t> rows, const Pass &pass) const {
    const Step &step = pass.step;
    Results &results = pass.results;
    const uint32_t n_vocab = model.config.n_vocab;
    const std::vector<float> top = queue_logits(side, rows, pass);
    std::vector<int32_t> targets;
    for (size_t i = 0; i < rows.size() && !step.targets.empty(); ++i)
        targets.push_back(step.targets[rows[i]]);
    std::vector<float> logprobs(targets.size());
    if (!targets.empty())
        side.ops.log_probabilities(side.stream, side.buffers.logits, static_cast<uint32_t>(rows.size()),
                                   n_vocab, targets.data(), logprobs.data());
    side.ops.synchronize(side.stream);
    for (size_t i = 0; i < targets.size(); ++i)
        results.logprobs[rows[i]] = logprobs[i];
    for (size_t i = 0; i < rows.size(); ++i) {
        const size_t at = results.tops.size();
        if (at == step.wanted.size() || step.wanted[at] != rows[i])
            continue;
        const uint32_t n = std::min(step.tops[at], n_vocab);
        results.tops.push_back(n == 0 ? TopLogits{}
                                      : read_top(top.data() + i * top_words(step.n_top), step.n_top, n));
    }
}

// The rows of the head a few at a time: a long scored text never needs all logits at once.
void Forward::finish(Side &side, const Pass &pass) const {
    const std::vector<uint32_t> &rows = pass.step.rows;
    Results &results = pass.results;
    results.logits.clear();
    results.tops.clear();
    const auto n_whole = std::count(pass.step.tops.begin(), pass.step.tops.end(), 0u);
    results.logits.reserve(static_cast<size_t>(n_whole) *
                           model.config.n_vocab); // what the plan counts, no more
    results.logprobs.assign(pass.step.targets.size(), std::numeric_limits<float>::quiet_NaN());
    for (uint32_t begin = 0; begin < rows.size(); begin += rows_each()) {
        if (begin > 0)
            head(side, pass.step, begin);
        const size_t n = std::min<size_t>(rows_each(), rows.size() - begin);
        read_rows(side, {rows.data() + begin, n}, pass);
    }
}

} // namespace pi
