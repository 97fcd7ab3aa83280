// bandwidth.cpp: how fast this machine reads memory, the limit that decoding is held against.
#include "pi.h"
#include "pool.h"
#include "status.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>

namespace pi {
namespace {

constexpr uint64_t chunk_words = (uint64_t{1} << 20) / sizeof(uint64_t); // dealt out to one thread
// Ahead of use: 4 KiB, the best of 0 to 8 KiB on Zen 5 (several streams side by side were no faster).
constexpr uint64_t prefetch_words = 512;
constexpr uint32_t min_passes = 3;
constexpr uint32_t max_threads = 1024;

// Anonymous memory in large pages where the system has them, so that no time goes into address translation.
class ReadBuffer {
  public:
    explicit ReadBuffer(uint64_t n_words)
        : n_bytes_(n_words * sizeof(uint64_t)),
          address_(mmap(nullptr, n_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        if (address_ == MAP_FAILED)
            throw Error(PI_DOES_NOT_FIT, "no memory to read from: " + std::string(std::strerror(errno)),
                        "close other programs");
#if defined(MADV_HUGEPAGE)
        madvise(address_, n_bytes_, MADV_HUGEPAGE);
#endif
    }
    ~ReadBuffer() { munmap(address_, n_bytes_); }
    ReadBuffer(const ReadBuffer &) = delete;
    ReadBuffer &operator=(const ReadBuffer &) = delete;

    uint64_t *words() const { return static_cast<uint64_t *>(address_); }

  private:
    uint64_t n_bytes_;
    void *address_;
};

// Sum of chunk_words words, so that every one of them is read.
uint64_t read_chunk(const uint64_t *words) {
    constexpr uint64_t line_words = 8;
    uint64_t sums[line_words] = {};
    for (uint64_t i = 0; i < chunk_words; i += line_words) {
        __builtin_prefetch(words + i + prefetch_words);
        for (uint64_t word = 0; word < line_words; ++word)
            sums[word] += words[i + word];
    }
    uint64_t sum = 0;
    for (const uint64_t part : sums)
        sum += part;
    return sum;
}

// Bytes a second of the fastest pass over n_chunks chunks, passes being made for at least min_seconds.
double read_rate(Pool &pool, uint64_t n_chunks, float min_seconds) {
    using Clock = std::chrono::steady_clock;
    const ReadBuffer buffer(n_chunks * chunk_words);
    uint64_t *words = buffer.words();
    const auto chunks = static_cast<int64_t>(n_chunks);
    pool.run(chunks, [&](int64_t chunk, uint32_t) {
        std::fill_n(words + static_cast<uint64_t>(chunk) * chunk_words, chunk_words, uint64_t{1});
    });
    std::atomic<uint64_t> total{0};
    double best = std::numeric_limits<double>::infinity();
    const auto start = Clock::now();
    auto now = start;
    for (uint32_t pass = 0; pass < min_passes || now - start < std::chrono::duration<float>(min_seconds);
         ++pass) {
        const auto begin = now;
        pool.run(chunks, [&](int64_t chunk, uint32_t) {
            total.fetch_add(read_chunk(words + static_cast<uint64_t>(chunk) * chunk_words),
                            std::memory_order_relaxed);
        });
        now = Clock::now();
        best = std::min(best, std::chrono::duration<double>(now - begin).count());
    }
    if (total.load() % (n_chunks * chunk_words) != 0)
        throw Error(PI_FAILURE, "memory did not hold what was written", "is the memory faulty?");
    return static_cast<double>(n_chunks * chunk_words * sizeof(uint64_t)) / best;
}

} // namespace
} // namespace pi

pi_status pi_probe_read(uint32_t n_threads, uint64_t n_bytes, float min_seconds, uint64_t *bytes_per_second) {
    return pi::guarded([&] {
        if (n_threads == 0 || n_threads > pi::max_threads)
            pi::throw_usage("n_threads must be 1 to 1024");
        if (!(min_seconds >= 0.0f && min_seconds <= 60.0f))
            pi::throw_usage("min_seconds must be 0 to 60");
        constexpr uint64_t chunk_bytes = pi::chunk_words * sizeof(uint64_t);
        if (n_bytes < chunk_bytes || n_bytes > (uint64_t{1} << 40))
            pi::throw_usage("n_bytes must be 1 MiB to 1 TiB");
        pi::Pool pool(n_threads);
        pi::require(bytes_per_second, "bytes_per_second") =
            static_cast<uint64_t>(pi::read_rate(pool, n_bytes / chunk_bytes, min_seconds));
    });
}
