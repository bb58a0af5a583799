#include "kernels/encoding/method.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

int encoding_refuse(char why[UCM_ENCODING_WHY], const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(why, UCM_ENCODING_WHY, format, args);
    va_end(args);
    return -EINVAL;
}
