#include "config.h"

#include "status.h"

#include <cmath>

namespace pi {
namespace {

// One row for each architecture whose graph the engine knows.
struct Family {
    const char *architecture;
    Norm norm;
    Rope rope;
    Block block;
    bool gated;
    Activation upstream_activation; // of PowerInfer's own files, which do not state it
    Activation dense_activation;    // of ordinary dense GGUF files, which do not state it either
};

constexpr Family families[] = {
    {"llama", Norm::rms, Rope::interleaved, Block::attention_then_ffn, true, Activation::relu,
     Activation::silu},
};

constexpr uint32_t known_format_version = 1;
constexpr uint32_t max_dimension = 1u << 24; // far above any model; keeps products within 64 bits

const Family &find_family(const std::string &architecture) {
    std::string names;
    for (const Family &family : families) {
        if (architecture == family.architecture)
            return family;
        names += (names.empty() ? "" : ", ") + std::string(family.architecture);
    }
    throw Error(PI_FAILURE, "architecture " + quoted(architecture) + " is not supported",
                "this version runs: " + names);
}

[[noreturn]] void throw_unsupported(const std::string &key) {
    throw Error(PI_FAILURE, "the key " + key + " asks for something that this version does not compute",
                "use a plain Llama model");
}

class Keys {
  public:
    Keys(const Gguf &file, std::string prefix) : file_(file), prefix_(std::move(prefix)) {}

    uint32_t dimension(const char *name) const {
        const auto value = file_.get_u32(prefix_ + name);
        if (!value)
            throw_bad_file("metadata key " + prefix_ + name + " is missing");
        return checked(name, *value);
    }
    uint32_t dimension(const char *name, uint32_t otherwise) const {
        return checked(name, file_.get_u32(prefix_ + name).value_or(otherwise));
    }
    float positive(const char *name, std::optional<float> otherwise = {}) const {
        const auto value = file_.get_f32(prefix_ + name);
        const float number = value.value_or(otherwise.value_or(0));
        if (!(number > 0) || !std::isfinite(number))
            throw_bad_file("metadata key " + prefix_ + name + " is missing or no positive number");
        return number;
    }

  private:
    uint32_t checked(const char *name, uint32_t value) const {
        if (value == 0 || value > max_dimension)
            throw_bad_file("metadata key " + prefix_ + name + " = " + std::to_string(value) +
                           " is out of range");
        return value;
    }

    const Gguf &file_;
    std::string prefix_;
};

void read_attention(const Gguf &file, const Keys &keys, ModelConfig &config) {
    config.n_heads = keys.dimension("attention.head_count");
    config.n_kv_heads = keys.dimension("attention.head_count_kv", config.n_heads);
    config.head_dim = keys.dimension("attention.key_length", std::max(config.n_embd / config.n_heads, 1u));
    config.n_rot = keys.dimension("rope.dimension_count", config.head_dim);
    config.sliding_window = file.get_u32(config.architecture + ".attention.sliding_window").value_or(0);
    if (config.n_heads % config.n_kv_heads != 0)
        throw_bad_file("attention.head_count is no multiple of attention.head_count_kv");
    if (config.n_heads > max_dimension / config.head_dim)
        throw_bad_file("attention.key_length is out of range");
    if (keys.dimension("attention.value_length", config.head_dim) != config.head_dim)
        throw_bad_file("attention.value_length differs from attention.key_length, which is not supported");
    if (config.n_rot > config.head_dim || config.n_rot % 2 != 0)
        throw_bad_file("rope.dimension_count is odd or larger than a head");
    const float own_scale = 1 / std::sqrt(static_cast<float>(config.head_dim));
    const float scale = file.get_f32(config.architecture + ".attention.scale").value_or(0);
    if (scale != 0 && !(std::abs(scale - own_scale) <= 1e-6f))
        throw_unsupported(config.architecture + ".attention.scale");
}

// Older files have only the factor, some of them under its first name.
void read_rope_scaling(const Gguf &file, const Keys &keys, ModelConfig &config) {
    const std::string prefix = config.architecture + ".rope.";
    const bool old_name = file.find(prefix + "scaling.factor") == nullptr;
    const char *factor = old_name ? "rope.scale_linear" : "rope.scaling.factor";
    const bool scaled = file.find(config.architecture + "." + factor) != nullptr;
    const auto kind = file.get_string(prefix + "scaling.type").value_or(scaled ? "linear" : "none");
    if (kind == "linear") {
        config.rope_scale = 1 / keys.positive(factor);
        if (!std::isfinite(config.rope_scale))
            throw_bad_file("the rope scaling factor is out of range");
    } else if (kind != "none") {
        throw Error(PI_FAILURE, "rope scaling " + quoted(kind) + " is not supported",
                    "supported: none, linear, and Llama 3's factors (tensor rope_freqs.weight)");
    }
}

// Keys with which other engines compute something else; each is neutral at the value beside it.
void refuse_other_functions(const Gguf &file, const std::string &architecture) {
    constexpr struct {
        const char *name;
        float neutral;
    } scales[] = {{"logit_scale", 1},
                  {"embedding_scale", 1},
                  {"residual_scale", 1},
                  {"attention.clamp_kqv", 0},
                  {"attn_logit_softcapping", 0},
                  {"final_logit_softcapping", 0},
                  {"attention.max_alibi_bias", 0},
                  {"rope.scaling.attn_factor", 1}};
    for (const auto &[name, neutral] : scales) {
        const std::string key = architecture + "." + name;
        if (file.get_f32(key).value_or(neutral) != neutral)
            throw_unsupported(key);
    }
    if (file.get_u32(architecture + ".attention.causal").value_or(1) == 0)
        throw Error(PI_FAILURE, "the model's attention is not causal: it does not generate text",
                    "use a text generation model");
    if (file.get_u32(architecture + ".expert_count").value_or(0) > 0)
        throw Error(PI_FAILURE, "mixture-of-experts models are not supported", "use a dense model");
}

Activation parse_activation(const std::string &name) {
    if (name == "silu")
        return Activation::silu;
    if (name == "relu")
        return Activation::relu;
    throw Error(PI_FAILURE, "powerinfer.activation is " + quoted(name) + ", which this version does not know",
                "known: silu, relu; a newer toolkit may read this file");
}

// One layer with a predictor promises one in every layer; find_weights misses those that are not there.
bool has_predictors(const Gguf &file) {
    for (const TensorView &tensor : file.tensors()) {
        if (tensor.name.ends_with(".fc1.weight") || tensor.name.ends_with(".fc2.weight"))
            return true;
    }
    return false;
}

std::vector<bool> read_exact_layers(const Gguf &file, uint32_t n_layers) {
    const Value *value = file.find("powerinfer.predictor.exact_layers");
    if (value == nullptr)
        return {};
    const bool flags = value->type == ValueType::array && value->element_type == ValueType::boolean;
    if (!flags || value->count != n_layers)
        throw_bad_file("powerinfer.predictor.exact_layers is no list of one boolean for each layer");
    return {value->bytes.begin(), value->bytes.end()};
}

void read_ffn(const Gguf &file, const Family &family, ModelConfig &config) {
    config.sparse_layout = file.find_tensor("blk.0.ffn_down_t.weight") != nullptr;
    config.has_predictors = has_predictors(file);
    const auto named = file.get_string("powerinfer.activation");
    if (file.powerinfer_magic() && !config.sparse_layout)
        throw_bad_file("the file has PowerInfer's magic but no ffn_down_t tensors");
    // Only upstream's own files may leave the activation out: guessing would run a model silently wrong.
    if (config.sparse_layout && !named && !file.powerinfer_magic())
        throw_bad_file("the file stores ffn_down_t but no key powerinfer.activation");
    config.activation = named ? parse_activation(*named)
                              : (config.sparse_layout ? family.upstream_activation : family.dense_activation);
    config.activation_threshold = file.get_f32("powerinfer.activation_threshold").value_or(0);
    config.sparse_threshold = file.get_f32("powerinfer.sparse_threshold").value_or(0);
    config.exact_layers = read_exact_layers(file, config.n_layers);
    config.sink_positions = file.get_u32("powerinfer.sink_positions").value_or(1);
}

} // namespace

ModelConfig read_config(const Gguf &file) {
    ModelConfig config;
    const uint32_t version = file.get_u32("powerinfer.format_version").value_or(known_format_version);
    if (version > known_format_version)
        throw Error(PI_FAILURE,
                    "the file has PowerInfer format version " + std::to_string(version) +
                        "; this version reads up to " + std::to_string(known_format_version),
                    "update powerinfer-toolkit");
    const uint32_t n_parts = file.get_u32("split.count").value_or(1);
    if (n_parts > 1)
        throw Error(PI_FAILURE, "the file is one of the " + std::to_string(n_parts) + " parts of a model",
                    "put the parts together first: llama-gguf-split --merge");
    const auto architecture = file.get_string("general.architecture");
    if (!architecture)
        throw_bad_file("metadata key general.architecture is missing");
    const Family &family = find_family(*architecture);
    config.architecture = *architecture;
    config.norm = family.norm;
    config.rope = family.rope;
    config.block = family.block;
    config.gated = family.gated;

    const Keys keys(file, config.architecture + ".");
    config.n_layers = keys.dimension("block_count");
    config.n_embd = keys.dimension("embedding_length");
    config.n_ff = keys.dimension("feed_forward_length");
    config.n_ctx_train = keys.dimension("context_length");
    config.rms_eps = keys.positive("attention.layer_norm_rms_epsilon");
    config.rope_theta = keys.positive("rope.freq_base", 10000.0f);
    read_attention(file, keys, config);
    read_rope_scaling(file, keys, config);
    read_ffn(file, family, config);
    refuse_other_functions(file, config.architecture);

    const TensorView *embedding = file.find_tensor("token_embd.weight");
    if (embedding == nullptr)
        throw_bad_file("tensor token_embd.weight is missing");
    if (embedding->dim(1) > max_dimension)
        throw_bad_file("token_embd.weight has too many rows");
    config.n_vocab = static_cast<uint32_t>(embedding->dim(1));
    config.tied_head = file.find_tensor("output.weight") == nullptr;
    return config;
}

} // namespace pi
