// fuzz_gguf.cpp: the reader of model files on arbitrary bytes: header, configuration, weights, and the last
// byte of every tensor and value. Whatever the bytes, pi::Error is the only way out. With clang
// (-fsanitize=fuzzer) a libFuzzer target; elsewhere PI_FUZZ_REPLAY adds a main that replays files.
#include "src/config.h"
#include "src/status.h"
#include "src/weights.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

volatile uint8_t sink; // keeps the reads

void touch(std::span<const uint8_t> bytes) {
    if (bytes.empty())
        return;
    sink = bytes.front();
    sink = bytes.back();
}

void read_all(std::span<const uint8_t> bytes) {
    const pi::Gguf file(bytes);
    for (const auto &[name, value] : file.keys())
        touch(value.bytes);
    for (const pi::TensorView &tensor : file.tensors())
        touch(tensor.bytes);
    const pi::ModelConfig config = pi::read_config(file);
    const pi::Weights weights = pi::find_weights(file, config);
    sink = static_cast<uint8_t>(weights.n_bytes());
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    // A copy of exactly this size, so that a read beyond it is seen; aligned as a map would be.
    const std::vector<uint8_t> bytes(data, data + size);
    try {
        read_all(bytes);
    } catch (const pi::Error &) {
    }
    return 0;
}

#ifdef PI_FUZZ_REPLAY
#include <cstdio>
#include <fstream>
#include <iterator>

int main(int argc, char **argv) {
    for (int i = 1; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        const std::vector<char> bytes((std::istreambuf_iterator<char>(file)),
                                      std::istreambuf_iterator<char>());
        LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size());
    }
    std::printf("%d files replayed\n", argc - 1);
    return 0;
}
#endif
