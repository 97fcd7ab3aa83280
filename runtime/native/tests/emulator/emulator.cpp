// emulator.cpp: a block's threads as fibers.
#include "emulator.h"

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <immintrin.h>
#include <ucontext.h>
#include <utility>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

constexpr size_t stack_bytes = 64 << 10;
constexpr size_t shared_bytes = 100 << 10;
constexpr size_t exchange_bytes = 32; // of a lane

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::vector<char> stack = std::vector<char>(stack_bytes);
    bool started = false, done = false;
    uint64_t barriers = 0;  // that it has reached
    uint64_t exchanges = 0; // of its warp
};

std::vector<Fiber> fibers;
jmp_buf scheduler;
size_t current;
uint32_t n_threads;
const std::function<void()> *body;
alignas(16) uint8_t shared[shared_bytes];
// [warp][parity]: values of the last two exchanges
std::vector<uint8_t> slots;

uint8_t *slot(size_t warp, uint64_t exchange) {
    return slots.data() + (warp * 2 + exchange % 2) * 32 * exchange_bytes;
}

[[noreturn]] void entry() {
    (*body)();
    fibers[current].done = true;
    _longjmp(scheduler, 1);
}

void resume(size_t i) {
    current = i;
    threadIdx = dim3(static_cast<uint32_t>(i), 0, 0);
    Fiber &fiber = fibers[i];
    if (_setjmp(scheduler) != 0)
        return;
    if (fiber.started)
        _longjmp(fiber.at, 1);
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = stack_bytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, entry, 0);
    setcontext(&fiber.start);
}

void pause() {
    if (_setjmp(fibers[current].at) == 0)
        _longjmp(scheduler, 1);
}

[[noreturn]] void fail(const char *what) {
    std::fprintf(stderr, "emulator: %s\n", what);
    std::abort();
}

// Whether every thread of [begin, end) has got as far; threads that ended count as having.
template <typename Count>
bool all_reached(size_t begin, size_t end, uint64_t n, Count count) {
    for (size_t i = begin; i < end; ++i) {
        if (!fibers[i].done && count(fibers[i]) < n)
            return false;
    }
    return true;
}

// Every other block runs its threads backwards: what lacks a barrier comes out wrong one way or the other.
void run_block() {
    static bool backwards = false;
    backwards = !backwards;
    for (uint32_t i = 0; i < n_threads; ++i) {
        fibers[i].started = fibers[i].done = false;
        fibers[i].barriers = fibers[i].exchanges = 0;
    }
    for (bool busy = true; busy;) {
        busy = false;
        for (size_t n = 0; n < n_threads; ++n) {
            const size_t i = backwards ? n_threads - 1 - n : n;
            if (fibers[i].done)
                continue;
            busy = true;
            resume(i);
        }
    }
}

} // namespace

void *dynamic_shared() {
    return shared;
}

void barrier() {
    const uint64_t n = ++fibers[current].barriers;
    while (!all_reached(0, n_threads, n, [](const Fiber &f) { return f.barriers; }))
        pause();
}

const uint8_t *exchange(const void *value, size_t n_bytes) {
    if (n_bytes > exchange_bytes)
        fail("a value is too large to exchange");
    const size_t warp = current / 32, lane = current % 32;
    const uint64_t n = ++fibers[current].exchanges;
    uint8_t *values = slot(warp, n);
    std::memcpy(values + lane * n_bytes, value, n_bytes);
    while (!all_reached(warp * 32, std::min<size_t>(warp * 32 + 32, n_threads), n,
                        [](const Fiber &f) { return f.exchanges; }))
        pause();
    return values;
}

void run_blocks(dim3 grid, dim3 block, const std::function<void()> &thread) {
    n_threads = block.x;
    if (block.y != 1 || block.z != 1 || n_threads % 32 != 0 || n_threads > 1024)
        fail("a block of an unexpected shape");
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535)
        fail("a grid that no device takes");
    if (fibers.size() < n_threads)
        fibers.resize(n_threads);
    slots.resize(size_t{n_threads} / 32 * 2 * 32 * exchange_bytes);
    body = &thread;
    gridDim = grid;
    blockDim = block;
    for (uint32_t z = 0; z < grid.z; ++z) {
        for (uint32_t y = 0; y < grid.y; ++y) {
            for (uint32_t x = 0; x < grid.x; ++x) {
                blockIdx = dim3(x, y, z);
                std::memset(shared, 0xff, sizeof shared); // NaN: what is not written must not be read
                run_block();
            }
        }
    }
}

float from_half(uint16_t bits) {
    return _cvtsh_ss(bits);
}

uint16_t to_half(float x) {
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}

} // namespace emulator

namespace pi_cuda {
namespace {

struct Copy {
    __half *to;
    const __half *from; // null: zeros
};

struct Copies {
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};

Copies &of_thread() {
    static std::vector<Copies> all(1024);
    return all[threadIdx.x];
}

} // namespace

void copy_async(__half *shared, const __half *global, bool inside) {
    if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0)
        __builtin_trap();
    of_thread().open.push_back({shared, inside ? global : nullptr});
}

void commit_copies() {
    Copies &mine = of_thread();
    mine.groups.push_back(std::exchange(mine.open, {}));
}

void wait_for_groups(size_t n_left) {
    auto &groups = of_thread().groups;
    for (; groups.size() > n_left; groups.pop_front()) {
        for (const Copy &copy : groups.front()) {
            if (copy.from == nullptr)
                std::memset(copy.to, 0, 16);
            else
                std::memcpy(copy.to, copy.from, 16);
        }
    }
}

} // namespace pi_cuda
