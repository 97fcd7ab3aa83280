// stress.cpp: the library under load from several threads at once, to be run under a sanitizer.
// Usage: pi_stress MODEL.gguf, as tests/runtime/stress_model.py writes it. Exit code 0: all checks held.
#include "pi.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr uint32_t prompt_tokens = 40, decode_steps = 24, rounds = 8, n_sequences = 4;
constexpr uint32_t wide_step = 6; // every third step of a text
constexpr uint32_t load_cycles = 1000, n_models = 8;

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

pi_model_config config_of(const pi_model *model) {
    pi_model_config config{};
    config.size = sizeof config;
    check(pi_model_get_config(model, &config));
    return config;
}

EnginePtr create_engine(pi_model *model, uint32_t n_threads) {
    const pi_model_config config = config_of(model);
    const std::vector<pi_unit> units = cpu_units(config);
    const pi_tier tiers[] = {{wide_step, PI_FFN_PREDICTED}, {prompt_tokens, PI_FFN_EXACT}};
    pi_plan plan{};
    plan.size = sizeof plan;
    plan.units = units.data();
    plan.n_units = static_cast<uint32_t>(units.size());
    plan.tiers = tiers;
    plan.n_tiers = 2;
    plan.n_threads = n_threads;
    plan.max_batch_tokens = prompt_tokens;
    plan.n_sequences = n_sequences;
    plan.n_context = 128;
    plan.n_kv_pages = 4 * n_sequences;
    plan.kv_type = PI_TYPE_F16;
    plan.activation_type = PI_TYPE_F32;
    plan.sparse_threshold = std::nanf("");
    pi_engine *engine = nullptr;
    check(pi_engine_create(model, &plan, &engine));
    return {engine, &pi_engine_free};
}

// Submits tokens [begin, begin + n) of a sequence; token ids follow from the positions. Logits: the last
// token's.
pi_status try_submit(pi_engine *engine, int32_t sequence, int32_t begin, uint32_t n, uint64_t *ticket) {
    std::vector<int32_t> tokens(n), positions(n), sequences(n, sequence);
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
    return pi_engine_submit(engine, &batch, ticket);
}

uint64_t submit(pi_engine *engine, int32_t begin, uint32_t n) {
    uint64_t ticket = 0;
    check(try_submit(engine, 0, begin, n, &ticket));
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
        const uint32_t n = step == 0 ? prompt_tokens : step % 3 == 0 ? wide_step : 1;
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
void aborts(pi_model *model, uint32_t recording) {
    const EnginePtr engine = create_engine(model, 3);
    check(pi_engine_set_recording(engine.get(), recording));
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

// Several threads drive one engine, each a sequence of its own: a step that is in the way is an error, and
// whoever tries again gets through.
void submitters(pi_model *model) {
    const EnginePtr engine = create_engine(model, 2);
    check(pi_engine_set_recording(engine.get(), 1));
    std::vector<std::function<void()>> tasks;
    for (int32_t sequence = 0; sequence < static_cast<int32_t>(n_sequences); ++sequence)
        tasks.emplace_back([&, sequence] {
            for (int32_t position = 0; position < static_cast<int32_t>(decode_steps);) {
                uint64_t ticket = 0;
                const pi_status status = try_submit(engine.get(), sequence, position, 1, &ticket);
                expect(status == PI_OK || status == PI_USAGE, "a refusal, no failure");
                if (status != PI_OK) {
                    std::this_thread::yield();
                    continue;
                }
                check(wait(engine.get(), ticket));
                ++position;
                uint32_t n_rows = 0, n_tokens = 0, n_words = 0;
                const float *logits = nullptr;
                const uint64_t *fired = nullptr;
                const pi_status read = pi_engine_logits(engine.get(), &n_rows, &logits);
                expect(read == PI_OK || read == PI_USAGE, "logits, or another's step");
                const pi_status seen = pi_engine_fired(engine.get(), &n_tokens, &n_words, &fired);
                expect(seen == PI_OK || seen == PI_USAGE, "a record, or another's step");
            }
        });
    run_together(tasks);
    for (uint32_t sequence = 0; sequence < n_sequences; ++sequence) {
        uint32_t length = 0;
        check(pi_kv_length(engine.get(), static_cast<int32_t>(sequence), &length));
        expect(length == decode_steps, "every step of every thread");
    }
}

// Engines are freed while a step runs.
void frees_in_flight(pi_model *model) {
    for (uint32_t round = 0; round < rounds; ++round)
        submit(create_engine(model, 2).get(), 0, prompt_tokens);
}

size_t entries(const char *folder) {
    size_t n = 0;
    for ([[maybe_unused]] const auto &entry : std::filesystem::directory_iterator(folder))
        ++n;
    return n;
}

size_t n_maps() {
    std::ifstream maps("/proc/self/maps");
    return static_cast<size_t>(
        std::count(std::istreambuf_iterator<char>(maps), std::istreambuf_iterator<char>(), '\n'));
}

// Opened and closed again and again, unused, used or in the middle of a step: nothing stays behind. (The leak
// checker counts the memory when the program ends.)
void load_cycle(const char *path, uint32_t cycle) {
    const ModelPtr model = open_model(path);
    if (cycle % 4 == 0)
        return;
    const EnginePtr engine = create_engine(model.get(), 2);
    if (cycle % 4 == 1)
        return;
    const uint64_t ticket = submit(engine.get(), 0, 2);
    if (cycle % 4 == 2)
        check(wait(engine.get(), ticket));
}

void load_cycles_leave_nothing(const char *path) {
    constexpr uint32_t warm_up = 40;
    constexpr size_t map_slack = 64; // arenas and stacks that the C library keeps for later threads
    size_t files = 0, maps = 0;
    for (uint32_t cycle = 0; cycle < load_cycles; ++cycle) {
        load_cycle(path, cycle);
        if (cycle != warm_up)
            continue;
        files = entries("/proc/self/fd");
        maps = n_maps();
    }
    expect(entries("/proc/self/fd") == files, "every file is closed");
    expect(n_maps() <= maps + map_slack, "every map is gone");
}

// Models of their own, opened, run and closed at the same time.
void models_side_by_side(const char *path) {
    std::vector<std::vector<float>> logits(n_models);
    std::vector<std::function<void()>> tasks;
    for (uint32_t i = 0; i < n_models; ++i)
        tasks.emplace_back([&, i] {
            for (uint32_t round = 0; round < 2; ++round) {
                const ModelPtr model = open_model(path);
                const EnginePtr engine = create_engine(model.get(), 1 + i % 3);
                logits[i] = generate(engine.get(), config_of(model.get()).n_vocab);
            }
        });
    run_together(tasks);
    for (uint32_t i = 1; i < n_models; ++i)
        expect(logits[i] == logits[0], "the same bits in every model");
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
        engines_side_by_side(model.get(), config_of(model.get()).n_vocab);
        aborts(model.get(), 0);
        aborts(model.get(), 1);
        submitters(model.get());
        frees_in_flight(model.get());
        errors_stay_in_their_thread();
        models_side_by_side(argv[1]);
        load_cycles_leave_nothing(argv[1]);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "pi_stress: %s\n", error.what());
        return 1;
    }
    return 0;
}
