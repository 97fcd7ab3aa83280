// packets.h: the CPU's end of pi_gpu_packet.
#pragma once

#include "cuda/pi_gpu.h"

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

constexpr uint64_t packet_words = 3;

constexpr uint64_t packets_for(uint64_t n_words) {
    return (n_words + packet_words - 1) / packet_words;
}

// Takes n_words out of packets, each as soon as it is there. wait() is called between two looks at one; where
// it returns false nothing more is waited for. Returns whether all came.
template <typename Wait>
bool take_packets(const pi_gpu_packet *packets, uint64_t n_words, uint32_t value, uint32_t *words,
                  Wait &&wait) {
    for (uint64_t i = 0; i * packet_words < n_words; ++i) {
        WholePacket packet = load_packet(packets + i);
        while (packet[3] != value) {
            if (!wait())
                return false;
            packet = load_packet(packets + i);
        }
        uint32_t *to = words + i * packet_words;
        if ((i + 1) * packet_words < n_words) // the next packet's first word is written over
            std::memcpy(to, &packet, sizeof packet);
        else
            std::memcpy(to, &packet, (n_words - i * packet_words) * sizeof(uint32_t));
    }
    return true;
}

inline void give_packets(const uint32_t *words, uint64_t n_words, uint32_t value, pi_gpu_packet *packets) {
    const uint64_t n_whole = n_words / packet_words, n_left = n_words % packet_words;
    for (uint64_t i = 0; i < n_whole; ++i) {
        const uint32_t *from = words + i * packet_words;
        store_packet(packets + i, WholePacket{from[0], from[1], from[2], value});
    }
    if (n_left == 0)
        return;
    uint32_t last[packet_words] = {};
    std::memcpy(last, words + n_whole * packet_words, n_left * sizeof(uint32_t));
    store_packet(packets + n_whole, WholePacket{last[0], last[1], last[2], value});
}

} // namespace pi
