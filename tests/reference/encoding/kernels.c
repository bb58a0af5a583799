/* The encodings of kernels/encoding for Python tests: functions that a ctypes call finds by name. */
#include "kernels/encoding/encoding.h"
#include "kernels/simd/isa.h"

#include <stddef.h>

/* No header declares what is found by name. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#pragma GCC visibility push(default)

/* Sets the instruction set of later calls and returns what this host then uses. */
uint32_t test_isa(uint32_t most)
{
    ucm_isa_limit(most);
    return ucm_isa();
}

uint32_t test_spec_bytes(void)
{
    return sizeof(struct ucm_encoding_spec);
}

uint32_t test_number(const char *name)
{
    return ucm_encoding_method_named(name)->number;
}

uint32_t test_version(const char *name)
{
    return ucm_encoding_method_named(name)->version;
}

/* The name of the table's i-th encoding; NULL after the last. */
const char *test_name(uint32_t i)
{
    return ucm_encoding_methods[i] ? ucm_encoding_methods[i]->name : NULL;
}

int test_check(const struct ucm_encoding_spec *spec, char *why)
{
    return ucm_encoding_check(spec, why);
}

uint64_t test_bytes(const struct ucm_encoding_spec *spec, uint32_t tensor)
{
    return ucm_encoding_bytes(spec, tensor);
}

void test_identity(const struct ucm_encoding_spec *spec, uint8_t *out)
{
    ucm_encoding_identity(spec, out);
}

void test_encode(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *raw,
                 uint8_t *encoded)
{
    ucm_encode(spec, tensor, raw, encoded);
}

void test_decode(const struct ucm_encoding_spec *spec, uint32_t tensor, const uint8_t *encoded,
                 uint8_t *raw)
{
    ucm_decode(spec, tensor, encoded, raw);
}
