// packets.h: the CPU's end of pi_gpu_packet.
#pragma once

#include "cuda/pi_gpu.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

namespace pi {

// A packet as one access of 16 bytes: what both sides must make of it. x86 promises that of aligned vectors
// where it has AVX (Intel SDM 3A 9.1.1, AMD64 APM 2 7.3.2), ARM where it has LSE2.
using WholePacket = uint32_t __attribute__((vector_size(16)));

inline WholePacket load_packet(const pi_gpu_packet *at) {
    return *reinterpret_cast<const volatile WholePacket *>(at);
}
inline void store_packet(pi_gpu_packet *at, WholePacket packet) {
    *reinterpret_cast<volatile WholePacket *>(at) = packet;
}
inline bool has_value(WholePacket packet, uint32_t value) {
    return packet[PI_GPU_PACKET_WORDS] >> 8 == value;
}

constexpr uint32_t packets_for_words(uint32_t n) {
    return (n + PI_GPU_PACKET_WORDS - 1) / PI_GPU_PACKET_WORDS;
}
constexpr uint32_t packets_for_elements(uint32_t n) {
    return (n + PI_GPU_PACKET_ELEMENTS - 1) / PI_GPU_PACKET_ELEMENTS;
}

inline void unpack_elements(WholePacket packet, float (&x)[PI_GPU_PACKET_ELEMENTS]) {
    using Integers = int16_t __attribute__((vector_size(16)));
    using Floats = float __attribute__((vector_size(32)));
    const float unit = std::bit_cast<float>((packet[PI_GPU_PACKET_WORDS] & 255u) << 23);
    const Floats elements = __builtin_convertvector(std::bit_cast<Integers>(packet), Floats) * unit;
    std::memcpy(x, &elements, sizeof x);
}

inline WholePacket pack_elements(const float (&x)[PI_GPU_PACKET_ELEMENTS], uint32_t value) {
    uint32_t largest = 0;
    for (const float element : x)
        largest = std::max(largest, std::bit_cast<uint32_t>(element) & 0x7fffffffu);
    const uint32_t exponent = largest >> 23, step = exponent == 255 ? 255 : std::max(exponent, 15u) - 14;
    const auto inverse = std::bit_cast<float>(step == 255 ? 0 : (254 - step) << 23);
    uint32_t integers[PI_GPU_PACKET_ELEMENTS];
    for (uint32_t i = 0; i < PI_GPU_PACKET_ELEMENTS; ++i) {
        const float rounded = x[i] * inverse + 12582912.0f; // 1.5 x 2^23: the integer is in the lowest bits
        const auto integer = static_cast<int32_t>(std::bit_cast<uint32_t>(rounded) - 0x4b400000u);
        integers[i] = static_cast<uint32_t>(std::min(integer, 32767)) & 0xffffu;
    }
    return WholePacket{integers[0] | integers[1] << 16, integers[2] | integers[3] << 16,
                       integers[4] | integers[5] << 16, value << 8 | step};
}

// Waits for the packet. wait() is called between two looks at it; where it returns false this does too.
template <typename Wait>
bool await_packet(const pi_gpu_packet *at, uint32_t value, Wait &&wait, WholePacket &packet) {
    for (packet = load_packet(at); !has_value(packet, value); packet = load_packet(at)) {
        if (!wait())
            return false;
    }
    return true;
}

// Takes x [n] out of packets, each as soon as it is there. Returns whether all came.
template <typename Wait>
bool take_elements(const pi_gpu_packet *packets, uint32_t n, uint32_t value, float *x, Wait &&wait) {
    for (uint32_t i = 0; i < n; i += PI_GPU_PACKET_ELEMENTS) {
        WholePacket packet;
        float elements[PI_GPU_PACKET_ELEMENTS];
        if (!await_packet(packets++, value, wait, packet))
            return false;
        unpack_elements(packet, elements);
        if (i + PI_GPU_PACKET_ELEMENTS <= n)
            std::memcpy(x + i, elements, sizeof elements);
        else
            std::memcpy(x + i, elements, (n - i) * sizeof(float));
    }
    return true;
}

// The same for words [n].
template <typename Wait>
bool take_words(const pi_gpu_packet *packets, uint32_t n, uint32_t value, uint32_t *words, Wait &&wait) {
    for (uint32_t i = 0; i < n; i += PI_GPU_PACKET_WORDS) {
        WholePacket packet;
        if (!await_packet(packets++, value, wait, packet))
            return false;
        std::memcpy(words + i, &packet, std::min(PI_GPU_PACKET_WORDS, n - i) * sizeof(uint32_t));
    }
    return true;
}

inline void give_elements(const float *x, uint32_t n, uint32_t value, pi_gpu_packet *packets) {
    for (uint32_t i = 0; i < n; i += PI_GPU_PACKET_ELEMENTS) {
        float elements[PI_GPU_PACKET_ELEMENTS] = {};
        if (i + PI_GPU_PACKET_ELEMENTS <= n)
            std::memcpy(elements, x + i, sizeof elements);
        else
            std::memcpy(elements, x + i, (n - i) * sizeof(float));
        store_packet(packets++, pack_elements(elements, value));
    }
}

} // namespace pi
