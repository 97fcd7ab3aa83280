// stress.cpp: the library under load from several threads at once, to be run under a sanitizer.
// Usage: pi_stress MODEL.gguf, as tests/runtime/stress_model.py writes it. Exit code 0: all checks held.
#include "pi.h"

#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr uint32_t prompt_tokens = 40, decode_steps = 24, rounds = 8;

void check(pi_status status) {
    if (status != PI_OK)
        throw std::runtime_error(pi_last_error());
}

void expect(bool holds, const char *what) {
    if (!holds)
        throw std::runtime_error(std::string("does not hold: ") + what);
}

using ModelPtr = std::unique_ptr<pi_model, decltype(&pi_model_close)>;
using EnginePtr = std::unique_ptr<pi_engine, decltype(&pi_engine_free)>;

ModelPtr open_model(const char *path) {
    pi_model *model = nullptr;
    check(pi_model_open(path, &model));
    return {model, &pi_model_close};
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

EnginePtr create_engine(pi_model *model, uint32_t n_threads) {
    pi_model_config config{};
    config.size = sizeof config;
    check(pi_model_get_config(model, &config));
    const std::vector<pi_unit> units = cpu_units(config);
    const pi_tier tiers[] = {{1, PI_FFN_PREDICTED}, {prompt_tokens, PI_FFN_EXACT}};
    pi_plan plan{};
    plan.size = sizeof plan;
    plan.units = units.data();
    plan.n_units = static_cast<uint32_t>(units.size());
    plan.tiers = tiers;
    plan.n_tiers = 2;
    plan.n_threads = n_threads;
    plan.max_batch_tokens = prompt_tokens;
    plan.n_sequences = 2;
    plan.n_context = 128;
    plan.n_kv_pages = 8;
    plan.kv_type = PI_TYPE_F16;
    plan.activation_type = PI_TYPE_F32;
    plan.sparse_threshold = std::nanf("");
    pi_engine *engine = nullptr;
    check(pi_engine_create(model, &plan, &engine));
    return {engine, &pi_engine_free};
}

// Submits tokens [begin, begin + n) of sequence 0; token ids follow from the positions. Logits: the last
// token's.
uint64_t submit(pi_engine *engine, int32_t begin, uint32_t n) {
    std::vector<int32_t> tokens(n), positions(n), sequences(n, 0);
    std::vector<uint8_t> want(n, 0);
    want.back() = 1;
    for (uint32_t i = 0; i < n; ++i) {
        positions[i] = begin + static_cast<int32_t>(i);
        tokens[i] = positions[i] * 31 % 200 + 3;
    }
    pi_batch batch{};
    batch.size = sizeof batch;
    batch.n_tokens = n;
    batch.tokens = tokens.data();
    batch.positions = positions.data();
    batch.sequences = sequences.data();
    batch.want_logits = want.data();
    batch.n_position_axes = 1;
    uint64_t ticket = 0;
    check(pi_engine_submit(engine, &batch, &ticket));
    return ticket;
}

pi_status wait(pi_engine *engine, uint64_t ticket) {
    uint32_t done = 0;
    return pi_engine_wait(engine, ticket, UINT32_MAX, &done);
}

// Prompt and decode steps; returns all logits [1 + decode_steps, n_vocab].
std::vector<float> generate(pi_engine *engine, uint32_t n_vocab) {
    check(pi_kv_truncate(engine, 0, 0));
    std::vector<float> logits;
    int32_t position = 0;
    for (uint32_t step = 0; step <= decode_steps; ++step) {
        const uint32_t n = step == 0 ? prompt_tokens : 1;
        check(wait(engine, submit(engine, position, n)));
        position += static_cast<int32_t>(n);
        const float *data = nullptr;
        uint32_t n_rows = 0;
        check(pi_engine_logits(engine, &n_rows, &data));
        expect(n_rows == 1, "one row of logits");
        logits.insert(logits.end(), data, data + n_vocab);
    }
    return logits;
}

// Runs every task in a thread of its own; rethrows the first failure.
void run_together(const std::vector<std::function<void()>> &tasks) {
    std::vector<std::string> failures(tasks.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < tasks.size(); ++i)
        threads.emplace_back([&, i] {
            try {
                tasks[i]();
            } catch (const std::exception &error) {
                failures[i] = error.what();
            }
        });
    for (std::thread &thread : threads)
        thread.join();
    for (const std::string &failure : failures)
        if (!failure.empty())
            throw std::runtime_error(failure);
}

// Engines with 1, 2 and 4 threads share one model, run at the same time and agree bit for bit.
void engines_side_by_side(pi_model *model, uint32_t n_vocab) {
    std::vector<std::vector<float>> logits(3);
    std::vector<std::function<void()>> tasks;
    for (size_t i = 0; i < logits.size(); ++i)
        tasks.emplace_back([&, i] {
            const EnginePtr engine = create_engine(model, 1u << i);
            for (uint32_t round = 0; round < 2; ++round)
                logits[i] = generate(engine.get(), n_vocab);
        });
    run_together(tasks);
    expect(logits[0] == logits[1] && logits[0] == logits[2], "the same bits on 1, 2 and 4 threads");
}

// A step that another thread aborts ends as a whole or not at all.
void aborts(pi_model *model) {
    const EnginePtr engine = create_engine(model, 3);
    for (uint32_t round = 0; round < rounds; ++round) {
        check(pi_kv_truncate(engine.get(), 0, 0));
        const uint64_t ticket = submit(engine.get(), 0, prompt_tokens);
        pi_status aborted = PI_FAILURE;
        std::thread interrupter([&] { aborted = pi_engine_abort(engine.get()); });
        const pi_status status = wait(engine.get(), ticket);
        interrupter.join();
        check(aborted);
        uint32_t length = 0;
        check(pi_kv_length(engine.get(), 0, &length));
        expect(status == PI_OK ? length == prompt_tokens : status == PI_INTERRUPTED && length == 0,
               "an aborted step leaves nothing");
    }
}

// Engines are freed while a step runs.
void frees_in_flight(pi_model *model) {
    for (uint32_t round = 0; round < rounds; ++round)
        submit(create_engine(model, 2).get(), 0, prompt_tokens);
}

// Every thread reads its own last error.
void errors_stay_in_their_thread() {
    std::vector<std::function<void()>> tasks;
    for (int thread = 0; thread < 3; ++thread)
        tasks.emplace_back([thread] {
            const std::string path = "no such file " + std::to_string(thread);
            for (uint32_t round = 0; round < 100; ++round) {
                pi_model *model = nullptr;
                expect(pi_model_open(path.c_str(), &model) == PI_FAILURE, "a missing file fails");
                expect(std::string(pi_last_error()).find(path) != std::string::npos,
                       "the message names the file");
            }
        });
    run_together(tasks);
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2)
        return std::fputs("usage: pi_stress MODEL.gguf\n", stderr), 2;
    try {
        const ModelPtr model = open_model(argv[1]);
        pi_model_config config{};
        config.size = sizeof config;
        check(pi_model_get_config(model.get(), &config));
        engines_side_by_side(model.get(), config.n_vocab);
        aborts(model.get());
        frees_in_flight(model.get());
        errors_stay_in_their_thread();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "pi_stress: %s\n", error.what());
        return 1;
    }
    return 0;
}
