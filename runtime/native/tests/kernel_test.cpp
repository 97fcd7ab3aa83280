// kernel_test.cpp: every kernel of a table, in C++ alone, so that an emulator of another processor can run
// it. Exit code 0: all checks held. Without arguments it tests every usable table. Arguments name the tables
// that are to be usable; then it tests the last, which is the best.
#include "kernel_test.h"

#include "src/isa.h"

#include <cstdio>

namespace {

std::vector<const pi_kernels *> usable_tables() {
    std::vector<const pi_kernels *> usable;
    for (const pi_kernels *table : pi::kernel_tables()) {
        if (table->usable())
            usable.push_back(table);
    }
    return usable;
}

void expect_tables(const std::vector<const pi_kernels *> &usable, const std::vector<std::string> &expected) {
    std::vector<std::string> names;
    std::string line;
    for (const pi_kernels *table : usable) {
        names.emplace_back(table->name);
        line += " " + names.back();
    }
    pi::test::expect(names == expected, "usable here:" + line);
}

void run(const std::vector<std::string> &expected) {
    std::vector<const pi_kernels *> tables = usable_tables();
    if (!expected.empty()) {
        expect_tables(tables, expected);
        tables = {tables.back()};
    }
    for (const pi_kernels *table : tables) {
        pi::test::test_types(*table);
        pi::test::test_vectors(*table);
        std::printf("pi_kernel_test: %s\n", table->name);
    }
}

} // namespace

int main(int argc, char **argv) {
    try {
        run({argv + 1, argv + argc});
    } catch (const std::exception &error) {
        std::fprintf(stderr, "pi_kernel_test: %s\n", error.what());
        return 1;
    }
    return 0;
}
