// fuzz_gguf.cpp: a model file of arbitrary bytes through the reader, the configuration, the weights and one
// engine. Whatever the bytes, an error is the only way out. With clang (-fsanitize=fuzzer) this is a
// libFuzzer target.
#include "fuzz_gguf.h"

#include "src/config.h"
#include "src/status.h"
#include "src/weights.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

// The sanitizer's own hook: it sees malloc and operator new alike.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void *, size_t),
                                                         void (*free_hook)(const volatile void *));

namespace pi::fuzz {
namespace {

constexpr uint64_t always_allowed_bytes = 1 << 20;

std::atomic<uint64_t> largest{0};

void on_malloc(const volatile void *, size_t size) {
    uint64_t seen = largest;
    while (size > seen && !largest.compare_exchange_weak(seen, size)) {
    }
}

void on_free(const volatile void *) {}

void start_measuring() {
    static const int installed = __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
    if (installed == 0)
        throw std::runtime_error("no allocation hook: build with a sanitizer");
    largest = 0;
}

volatile uint8_t sink; // keeps the reads

void touch(std::span<const uint8_t> bytes) {
    if (bytes.empty())
        return;
    sink = bytes.front();
    sink = bytes.back();
}

Outcome read_all(std::span<const uint8_t> bytes) {
    try {
        const Gguf file(bytes);
        for (const auto &[name, value] : file.keys())
            touch(value.bytes);
        for (const TensorView &tensor : file.tensors())
            touch(tensor.bytes);
        const ModelConfig config = read_config(file);
        sink = static_cast<uint8_t>(find_weights(file, config).n_bytes());
        return Outcome::accepted;
    } catch (const Error &) {
        return Outcome::refused;
    }
}

// ---- the engine ----------------------------------------------------------------------------------------

void expect(bool holds, const char *what) {
    if (!holds)
        throw std::runtime_error(std::string("does not hold: ") + what);
}

// The file under a path, as pi_model_open wants it.
class MemoryFile {
  public:
    explicit MemoryFile(std::span<const uint8_t> bytes) : fd_(memfd_create("model", MFD_CLOEXEC)) {
        expect(fd_ >= 0 && write(fd_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
               "a file in memory");
    }
    ~MemoryFile() { close(fd_); }
    std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

  private:
    int fd_;
};

using ModelPtr = std::unique_ptr<pi_model, decltype(&pi_model_close)>;
using EnginePtr = std::unique_ptr<pi_engine, decltype(&pi_engine_free)>;
using SamplerPtr = std::unique_ptr<pi_sampler, decltype(&pi_sampler_free)>;

void list(const pi_model *model) {
    const char *name = nullptr;
    pi_value value{};
    value.size = sizeof value;
    for (uint64_t i = 0; i < pi_model_key_count(model); ++i) {
        expect(pi_model_key(model, i, &name, &value) == PI_OK, "a key by index");
        expect(pi_model_find_key(model, name, &value) == PI_OK && value.data != nullptr, "a key by name");
    }
    pi_tensor_info tensor{};
    tensor.size = sizeof tensor;
    for (uint64_t i = 0; i < pi_model_tensor_count(model); ++i)
        expect(pi_model_tensor(model, i, &name, &tensor) == PI_OK, "a tensor");
}

std::vector<pi_unit> cpu_units(const pi_model_config &config) {
    std::vector<pi_unit> units = {{PI_UNIT_EMBEDDING, 0, 0, 0, PI_PLACE_CPU},
                                  {PI_UNIT_HEAD, 0, 0, 0, PI_PLACE_CPU}};
    for (uint32_t layer = 0; layer < config.n_layers; ++layer) {
        units.push_back({PI_UNIT_ATTENTION, layer, 0, 0, PI_PLACE_CPU});
        units.push_back({PI_UNIT_KV, layer, 0, 0, PI_PLACE_CPU});
        if (config.has_predictors != 0)
            units.push_back({PI_UNIT_PREDICTOR, layer, 0, 0, PI_PLACE_CPU});
        units.push_back({PI_UNIT_NEURONS, layer, 0, config.n_ff, PI_PLACE_CPU});
    }
    return units;
}

EnginePtr create_engine(pi_model *model, const pi_model_config &config, uint32_t ffn_mode) {
    constexpr uint32_t n_batch = 3, n_context = 8;
    const std::vector<pi_unit> units = cpu_units(config);
    const pi_tier tier = {n_batch, ffn_mode};
    pi_plan plan{};
    plan.size = sizeof plan;
    plan.units = units.data();
    plan.n_units = static_cast<uint32_t>(units.size());
    plan.tiers = &tier;
    plan.n_tiers = 1;
    plan.n_threads = 1;
    plan.max_batch_tokens = n_batch;
    plan.n_sequences = 1;
    plan.n_context = n_context;
    plan.n_kv_pages = 1;
    plan.kv_type = PI_TYPE_F16;
    plan.activation_type = PI_TYPE_Q8_0;
    plan.sparse_threshold = std::nanf("");
    pi_engine *engine = nullptr;
    expect(pi_engine_create(model, &plan, &engine) == PI_OK, pi_last_error());
    return {engine, &pi_engine_free};
}

SamplerPtr create_sampler() {
    pi_sampler_params params{};
    params.size = sizeof params;
    params.temperature = 1;
    params.top_p = 0.9f;
    params.repeat_penalty = 1.1f;
    pi_sampler *sampler = nullptr;
    expect(pi_sampler_create(&params, &sampler) == PI_OK, "a sampler");
    return {sampler, &pi_sampler_free};
}

// Damaged weights may give logits that are no numbers; then the draw fails, and nothing else.
void step(pi_engine *engine, pi_sampler *sampler, const std::vector<int32_t> &tokens, int32_t position) {
    std::vector<int32_t> positions(tokens.size()), sequences(tokens.size(), 0);
    for (size_t i = 0; i < tokens.size(); ++i)
        positions[i] = position + static_cast<int32_t>(i);
    const std::vector<uint8_t> want(tokens.size(), 1);
    pi_batch batch{};
    batch.size = sizeof batch;
    batch.n_tokens = static_cast<uint32_t>(tokens.size());
    batch.tokens = tokens.data();
    batch.positions = positions.data();
    batch.sequences = sequences.data();
    batch.want_logits = want.data();
    batch.targets = tokens.data();
    batch.n_position_axes = 1;
    uint64_t ticket = 0;
    uint32_t done = 0;
    expect(pi_engine_submit(engine, &batch, &ticket) == PI_OK, pi_last_error());
    expect(pi_engine_wait(engine, ticket, UINT32_MAX, &done) == PI_OK && done != 0, pi_last_error());
    int32_t token = 0;
    float logprob = 0;
    const pi_status drawn = pi_sampler_sample(sampler, engine, 0, &token, &logprob);
    expect(drawn == PI_OK || drawn == PI_FAILURE, pi_last_error());
}

} // namespace

Outcome read_model(std::span<const uint8_t> file) {
    // A copy of exactly this size, so that a read beyond it is seen.
    const std::vector<uint8_t> bytes(file.begin(), file.end());
    start_measuring();
    const Outcome outcome = read_all(bytes);
    if (largest > std::max<uint64_t>(always_allowed_bytes, 2 * file.size()))
        throw std::runtime_error("an allocation of " + std::to_string(largest) + " bytes for a file of " +
                                 std::to_string(file.size()));
    return outcome;
}

void run_model(std::span<const uint8_t> file) {
    const MemoryFile named(file);
    pi_model *opened = nullptr;
    expect(pi_model_open(named.path().c_str(), &opened) == PI_OK, "what was read can be opened");
    const ModelPtr model(opened, &pi_model_close);
    list(opened);
    pi_model_config config{};
    config.size = sizeof config;
    expect(pi_model_get_config(opened, &config) == PI_OK, "the configuration");
    const bool sparse = config.sparse_layout != 0 && config.activation == PI_ACTIVATION_RELU;
    const uint32_t last_mode =
        sparse ? (config.has_predictors != 0 ? PI_FFN_PREDICTED : PI_FFN_EXACT) : PI_FFN_DENSE;
    const auto last_token = static_cast<int32_t>(config.n_vocab - 1);
    const SamplerPtr sampler = create_sampler();
    for (uint32_t mode = PI_FFN_DENSE; mode <= last_mode; ++mode) {
        const EnginePtr engine = create_engine(opened, config, mode);
        step(engine.get(), sampler.get(), {0, last_token, 0}, 0);
        step(engine.get(), sampler.get(), {last_token}, 3);
    }
}

uint64_t largest_allocation() {
    return largest;
}

} // namespace pi::fuzz

#ifdef PI_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (pi::fuzz::read_model({data, size}) == pi::fuzz::Outcome::accepted)
        pi::fuzz::run_model({data, size});
    return 0;
}
#endif
