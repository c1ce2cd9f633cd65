/* fuzz.h - what the fuzzers share.
 *
 * Each fuzz/NAME.c is a target for libFuzzer (`make fuzz`), and with replay.c a test that runs its seeds and
 * former finds, fuzz/corpus/NAME/, in every build (`make test SUITES=fuzz`), and with ASan changed ones. */
#ifndef TLY_FUZZ_H
#define TLY_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* What must hold for any input; ends the process where it does not, in every kind of build. */
#define require(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
