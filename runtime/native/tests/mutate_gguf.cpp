// mutate_gguf.cpp: damages model files in every way that a list can hold and reads each result: every byte of
// the header set to several values, every position of it overwritten by extreme numbers, the file cut at
// every byte of the header and at every 64 after it. To be run under sanitizers. Usage: pi_mutate_gguf
// [--as-it-is] FILE... Exit code 0: nothing but refusals and runs.
#include "fuzz_gguf.h"

#include "src/gguf.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t cut_step = 64;
constexpr uint32_t run_every =
    64; // accepted files per file that is also run: an engine costs a hundred reads
constexpr double longest_case_seconds = 5; // a thousand times what a case takes under sanitizers

constexpr uint8_t byte_values[] = {0x00, 0x01, 0x02, 0x7f, 0x80, 0xff};
constexpr uint8_t byte_flips[] = {0x01, 0x04, 0x20, 0x80};
constexpr uint64_t numbers[] = {
    0,         uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 40, uint64_t{1} << 63, UINT64_MAX - 7,
    UINT64_MAX};
constexpr uint32_t short_numbers[] = {0x7fffffff, 0x80000000, 0xffffffff, 1u << 24};

struct Tally {
    uint64_t n_cases = 0, n_accepted = 0, n_run = 0, largest_allocation = 0;
    double longest_seconds = 0;
};

void try_case(const Bytes &bytes, Tally &tally) {
    const auto start = std::chrono::steady_clock::now();
    ++tally.n_cases;
    const auto outcome = pi::fuzz::read_model(bytes);
    tally.largest_allocation = std::max(tally.largest_allocation, pi::fuzz::largest_allocation());
    if (outcome == pi::fuzz::Outcome::accepted && tally.n_accepted++ % run_every == 0) {
        ++tally.n_run;
        pi::fuzz::run_model(bytes);
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    tally.longest_seconds = std::max(tally.longest_seconds, seconds.count());
}

template <typename Number>
void overwrite(const Bytes &original, size_t position, Number number, Tally &tally) {
    if (position + sizeof number > original.size())
        return;
    Bytes bytes = original;
    std::memcpy(&bytes[position], &number, sizeof number);
    if (bytes != original)
        try_case(bytes, tally);
}

// Bytes before the first tensor's data.
size_t header_bytes(const Bytes &bytes) {
    const pi::Gguf file(bytes);
    size_t end = bytes.size();
    for (const pi::TensorView &tensor : file.tensors())
        end = std::min(end, static_cast<size_t>(tensor.bytes.data() - bytes.data()));
    return end;
}

void mutate(const Bytes &original, Tally &tally) {
    const size_t header = header_bytes(original);
    for (size_t at = 0; at < header; ++at) {
        for (const uint8_t value : byte_values)
            overwrite(original, at, value, tally);
        for (const uint8_t flip : byte_flips)
            overwrite(original, at, static_cast<uint8_t>(original[at] ^ flip), tally);
        for (const uint32_t number : short_numbers)
            overwrite(original, at, number, tally);
        for (const uint64_t number : numbers)
            overwrite(original, at, number, tally);
    }
    for (size_t size = 0; size < original.size(); size += size < header ? 1 : cut_step)
        try_case(Bytes(original.begin(), original.begin() + static_cast<std::ptrdiff_t>(size)), tally);
}

Bytes read_file(const char *path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

} // namespace

int main(int argc, char **argv) {
    const bool as_it_is = argc > 1 && std::strcmp(argv[1], "--as-it-is") == 0;
    const int first = as_it_is ? 2 : 1;
    const auto start = std::chrono::steady_clock::now();
    Tally tally;
    try {
        for (int i = first; i < argc; ++i) {
            const Bytes bytes = read_file(argv[i]);
            try_case(bytes, tally);
            if (!as_it_is)
                mutate(bytes, tally);
        }
    } catch (const std::exception &error) {
        return std::fprintf(stderr, "pi_mutate_gguf: case %llu: %s\n",
                            static_cast<unsigned long long>(tally.n_cases), error.what()),
               1;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf(
        "%llu cases, %llu accepted, %llu run, largest allocation %llu bytes, longest case %.3f s, "
        "%.1f s\n",
        static_cast<unsigned long long>(tally.n_cases), static_cast<unsigned long long>(tally.n_accepted),
        static_cast<unsigned long long>(tally.n_run),
        static_cast<unsigned long long>(tally.largest_allocation), tally.longest_seconds, seconds.count());
    return tally.longest_seconds < longest_case_seconds ? 0 : 1;
}
