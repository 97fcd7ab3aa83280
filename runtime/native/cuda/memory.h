// memory.h: device memory in mapped chunks: one range of addresses, physical memory mapped behind it as it is
// needed and given back from its end, never beyond a limit.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace pi_cuda {

class Arena {
  public:
    // The current device; address_bytes: room for every allocation. Throws Failure.
    Arena(int ordinal, uint64_t address_bytes);
    ~Arena();
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    // Aligned to 256 bytes. Throws Failure (PI_DOES_NOT_FIT) when more than limit_bytes would be mapped, or
    // when the device has no more.
    void *allocate(uint64_t n_bytes, uint64_t limit_bytes);
    // Nothing that is queued may still use it.
    void release(void *data);
    uint64_t mapped_bytes() const { return mapped_; }

  private:
    struct Chunk {
        uint64_t begin;
        uint64_t n_bytes;
        uint64_t handle;
    };
    using Blocks = std::map<uint64_t, uint64_t>; // begin -> bytes

    void extend(uint64_t n_bytes, uint64_t limit_bytes);
    void map_chunk(uint64_t n_bytes);
    void add_free(uint64_t begin, uint64_t n_bytes);
    void trim();
    void unmap(const Chunk &chunk) noexcept;

    int ordinal_;
    uint64_t granularity_ = 0;
    uint64_t address_bytes_ = 0;
    uint64_t base_ = 0;
    uint64_t mapped_ = 0;
    std::vector<Chunk> chunks_; // one after the other from 0 to mapped_
    Blocks free_;
    Blocks used_;
};

} // namespace pi_cuda
