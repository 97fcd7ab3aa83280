// kernel_test.cpp: every kernel of every table that this processor can run, in C++ alone, so that an emulator
// of another processor can run it. Exit code 0: all checks held. Usage: pi_kernel_test [TABLE ...]: fails
// unless the usable tables are exactly these.
#include "kernel_test.h"

#include "src/isa.h"

#include <cstdio>

namespace {

std::string usable_tables() {
    std::string names;
    for (const pi_kernels *table : pi::kernel_tables()) {
        if (table->usable())
            names += " " + std::string(table->name);
    }
    return names;
}

void run(const std::string &expected) {
    const std::string usable = usable_tables();
    pi::test::expect(expected.empty() || usable == expected,
                     "usable here:" + usable + "; expected:" + expected);
    for (const pi_kernels *table : pi::kernel_tables()) {
        if (!table->usable())
            continue;
        pi::test::test_types(*table);
        pi::test::test_vectors(*table);
    }
    std::printf("pi_kernel_test:%s\n", usable.c_str());
}

} // namespace

int main(int argc, char **argv) {
    std::string expected;
    for (int i = 1; i < argc; ++i)
        expected += " " + std::string(argv[i]);
    try {
        run(expected);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "pi_kernel_test: %s\n", error.what());
        return 1;
    }
    return 0;
}
