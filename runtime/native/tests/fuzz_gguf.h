// fuzz_gguf.h: one case of the fuzz test of model files, shared by libFuzzer's target and the program that
// makes its own cases (mutate_gguf.cpp).
#pragma once

#include <cstdint>
#include <span>

namespace pi::fuzz {

enum class Outcome { refused, accepted };

// Reads a file held in memory as far as opening a model does, and every byte range that it found. Anything
// but pi::Error escapes. Throws std::runtime_error when one allocation is larger than a file of this size may
// cause.
Outcome read_model(std::span<const uint8_t> file);

// Opens an accepted file the way users do, lists it, and runs a prompt and a decode step in every FFN mode.
// Throws std::runtime_error for a status that the interface does not allow.
void run_model(std::span<const uint8_t> file);

// Largest allocation of the last read_model, in bytes.
uint64_t largest_allocation();

} // namespace pi::fuzz
