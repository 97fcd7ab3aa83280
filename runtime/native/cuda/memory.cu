// memory.cu: the arena on the driver's virtual memory interface, whose functions are looked up at run time.
#include "memory.h"

#include "driver.cuh"

namespace pi_cuda {
namespace {

constexpr uint64_t alignment = 256;
constexpr int driver_version = 11000;
constexpr uint64_t min_growth = 8u << 20; // of many small allocations

struct Driver {
    decltype(&cuMemGetAllocationGranularity) granularity;
    decltype(&cuMemAddressReserve) reserve;
    decltype(&cuMemAddressFree) free_addresses;
    decltype(&cuMemCreate) create;
    decltype(&cuMemRelease) release;
    decltype(&cuMemMap) map;
    decltype(&cuMemUnmap) unmap;
    decltype(&cuMemSetAccess) set_access;
};

const Driver &driver() {
    static const Driver functions = [] {
        Driver d{};
        find_driver_function("cuMemGetAllocationGranularity", driver_version, d.granularity);
        find_driver_function("cuMemAddressReserve", driver_version, d.reserve);
        find_driver_function("cuMemAddressFree", driver_version, d.free_addresses);
        find_driver_function("cuMemCreate", driver_version, d.create);
        find_driver_function("cuMemRelease", driver_version, d.release);
        find_driver_function("cuMemMap", driver_version, d.map);
        find_driver_function("cuMemUnmap", driver_version, d.unmap);
        find_driver_function("cuMemSetAccess", driver_version, d.set_access);
        return d;
    }();
    return functions;
}

void check_driver(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS)
        return;
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        throw Failure{PI_DOES_NOT_FIT, std::string(what) +
                                           ": the device has no more free memory; another program "
                                           "may have taken it"};
    throw Failure{PI_FAILURE, std::string(what) + " failed with driver error " + std::to_string(result)};
}

CUmemAllocationProp properties(int ordinal) {
    CUmemAllocationProp property{};
    property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    property.location.id = ordinal;
    return property;
}

uint64_t round_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

} // namespace

Arena::Arena(int ordinal, uint64_t address_bytes) : ordinal_(ordinal) {
    const CUmemAllocationProp property = properties(ordinal);
    size_t granularity = 0;
    check_driver(driver().granularity(&granularity, &property, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                 "cuMemGetAllocationGranularity");
    granularity_ = granularity;
    address_bytes_ = round_up(address_bytes, granularity_);
    CUdeviceptr base = 0;
    check_driver(driver().reserve(&base, address_bytes_, 0, 0, 0), "reserving device addresses");
    base_ = base;
}

Arena::~Arena() {
    while (!chunks_.empty()) {
        unmap(chunks_.back());
        chunks_.pop_back();
    }
    driver().free_addresses(base_, address_bytes_);
}

void Arena::unmap(const Chunk &chunk) noexcept {
    driver().unmap(base_ + chunk.begin, chunk.n_bytes);
    driver().release(chunk.handle);
}

void *Arena::allocate(uint64_t n_bytes, uint64_t limit_bytes) {
    const uint64_t need = round_up(n_bytes == 0 ? 1 : n_bytes, alignment);
    auto fits = [need](const auto &block) { return block.second >= need; };
    auto block = free_.begin();
    while (block != free_.end() && !fits(*block))
        ++block;
    if (block == free_.end()) {
        extend(need, limit_bytes);
        block = std::prev(free_.end()); // the end of the mapped memory is free now
    }
    const uint64_t begin = block->first, left = block->second - need;
    free_.erase(block);
    if (left > 0)
        free_[begin + need] = left;
    used_[begin] = need;
    return reinterpret_cast<void *>(base_ + begin);
}

// Maps memory until the last free block has n_bytes.
void Arena::extend(uint64_t n_bytes, uint64_t limit_bytes) {
    uint64_t last = 0;
    if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second == mapped_)
        last = free_.rbegin()->second;
    const uint64_t least = round_up(n_bytes - last, granularity_);
    const uint64_t roomy = round_up(n_bytes - last > min_growth ? n_bytes - last : min_growth, granularity_);
    const uint64_t growth = mapped_ + roomy <= limit_bytes ? roomy : least;
    if (mapped_ + growth > limit_bytes || mapped_ + growth > address_bytes_)
        throw Failure{PI_DOES_NOT_FIT, "allocating " + std::to_string(n_bytes) + " bytes beside the " +
                                           std::to_string(mapped_) + " mapped ones would exceed the " +
                                           std::to_string(limit_bytes) + " that the budget leaves"};
    const uint64_t begin = mapped_;
    map_chunk(growth);
    add_free(begin, growth);
}

void Arena::map_chunk(uint64_t n_bytes) {
    const CUmemAllocationProp property = properties(ordinal_);
    CUmemGenericAllocationHandle handle = 0;
    check_driver(driver().create(&handle, n_bytes, &property, 0), "taking device memory");
    CUresult result = driver().map(base_ + mapped_, n_bytes, 0, handle, 0);
    if (result == CUDA_SUCCESS) {
        CUmemAccessDesc access{};
        access.location = property.location;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        result = driver().set_access(base_ + mapped_, n_bytes, &access, 1);
        if (result != CUDA_SUCCESS)
            driver().unmap(base_ + mapped_, n_bytes);
    }
    if (result != CUDA_SUCCESS)
        driver().release(handle);
    check_driver(result, "mapping device memory");
    chunks_.push_back({mapped_, n_bytes, handle});
    mapped_ += n_bytes;
}

void Arena::add_free(uint64_t begin, uint64_t n_bytes) {
    auto next = free_.lower_bound(begin);
    if (next != free_.end() && next->first == begin + n_bytes) {
        n_bytes += next->second;
        next = free_.erase(next);
    }
    if (next != free_.begin()) {
        const auto before = std::prev(next);
        if (before->first + before->second == begin) {
            before->second += n_bytes;
            return;
        }
    }
    free_[begin] = n_bytes;
}

void Arena::release(void *data) {
    const auto block = used_.find(reinterpret_cast<uint64_t>(data) - base_);
    if (block == used_.end())
        throw Failure{PI_FAILURE, "releasing device memory that was not allocated"};
    const auto [begin, n_bytes] = *block;
    used_.erase(block);
    add_free(begin, n_bytes);
    trim();
}

// Gives back the chunks at the end that nothing uses.
void Arena::trim() {
    while (!chunks_.empty() && !free_.empty()) {
        const Chunk chunk = chunks_.back();
        const auto last = std::prev(free_.end());
        if (last->first + last->second != mapped_ || last->first > chunk.begin)
            return;
        unmap(chunk);
        chunks_.pop_back();
        mapped_ = chunk.begin;
        if (last->first == chunk.begin) {
            free_.erase(last);
        } else {
            last->second = chunk.begin - last->first;
        }
    }
}

} // namespace pi_cuda
