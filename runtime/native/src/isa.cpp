#include "isa.h"

#include "pi.h"
#include "status.h"

#include <cstdlib>
#include <string>
#include <string_view>

namespace pi {
namespace {

// The last one that is usable is chosen where none is asked for; never amx's stand-in for tests.
constexpr const pi_kernels *tables[] = {
    &pi_kernels_scalar,
#if defined(__x86_64__)
    &pi_kernels_avx2,
#ifdef PI_AMX_EMULATOR
    &pi_kernels_amx_emulated,
#endif
    &pi_kernels_avx512,       &pi_kernels_avx512_bf16, &pi_kernels_amx,
#elif defined(__aarch64__)
    &pi_kernels_neon,
    &pi_kernels_neon_dotprod,
    &pi_kernels_neon_i8mm,
#endif
};

std::string usable_names() {
    std::string names;
    for (const pi_kernels *table : tables) {
        if (table->usable())
            names += (names.empty() ? "" : ", ") + std::string(table->name);
    }
    return names;
}

const pi_kernels &best_usable() {
    const pi_kernels *best = &pi_kernels_scalar;
    for (const pi_kernels *table : tables) {
        if (table->usable())
            best = table;
    }
    return *best;
}

const pi_kernels *find_table(std::string_view name) {
    for (const pi_kernels *table : tables) {
        if (name == table->name)
            return table;
    }
    return nullptr;
}

} // namespace

std::span<const pi_kernels *const> kernel_tables() {
    return tables;
}

const pi_kernels &select_kernels(const char *requested) {
    std::string_view name = requested != nullptr ? requested : "";
    const char *environment = std::getenv("PI_ISA");
    const bool from_environment = name.empty() && environment != nullptr;
    if (from_environment)
        name = environment;
    if (name.empty())
        return best_usable();

    const pi_kernels *table = find_table(name);
    if (table != nullptr && table->usable())
        return *table;
    const std::string what =
        (from_environment ? "PI_ISA: " : "") + std::string("instruction set '") + std::string(name) + "' ";
    throw Error(PI_USAGE, what + (table == nullptr ? "is unknown" : "does not run on this processor"),
                "usable here: " + usable_names());
}

} // namespace pi

uint32_t pi_isa_count(void) {
    return static_cast<uint32_t>(pi::kernel_tables().size());
}

pi_status pi_isa(uint32_t index, const char **name, uint32_t *usable) {
    return pi::guarded([&] {
        if (index >= pi::kernel_tables().size())
            pi::throw_usage("pi_isa: index out of range");
        const pi_kernels &table = *pi::kernel_tables()[index];
        pi::require(name, "name") = table.name;
        pi::require(usable, "usable") = table.usable() ? 1 : 0;
    });
}

pi_status pi_isa_select(const char *requested, const char **name) {
    return pi::guarded([&] { pi::require(name, "name") = pi::select_kernels(requested).name; });
}
