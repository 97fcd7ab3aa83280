// memory.cpp: the arena of the emulated device: an allocation of the host each, so that a memory checker sees
// their ends, filled with NaN.
#include "cuda/memory.h"

#include "cuda/device.cuh"

#include <cstdlib>
#include <cstring>

namespace pi_cuda {

Arena::Arena(int ordinal, uint64_t address_bytes) : ordinal_(ordinal), address_bytes_(address_bytes) {}

Arena::~Arena() {
    for (const auto &[address, n_bytes] : used_)
        std::free(reinterpret_cast<void *>(address));
}

void *Arena::allocate(uint64_t n_bytes, uint64_t limit_bytes) {
    const uint64_t need = (n_bytes + 255) / 256 * 256;
    if (mapped_ + need > limit_bytes)
        throw Failure{PI_DOES_NOT_FIT,
                      "allocating " + std::to_string(n_bytes) + " bytes would exceed the budget"};
    void *data = std::aligned_alloc(256, need == 0 ? 256 : need);
    std::memset(data, 0xff, need);
    used_[reinterpret_cast<uint64_t>(data)] = need;
    mapped_ += need;
    return data;
}

void Arena::release(void *data) {
    const auto block = used_.find(reinterpret_cast<uint64_t>(data));
    if (block == used_.end())
        throw Failure{PI_FAILURE, "releasing device memory that was not allocated"};
    mapped_ -= block->second;
    used_.erase(block);
    std::free(data);
}

} // namespace pi_cuda
