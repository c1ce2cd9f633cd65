/* error.c - the calling thread's last sentence; what tally_error() returns. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char sentence[TLY_SENTENCE];

int(tly_fail)(int err, const char *format, ...)
{
    char text[TLY_SENTENCE]; /* the arguments may include the old sentence */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(sentence, text, sizeof text);
    return -err;
}

const char *tly_error(void)
{
    return sentence;
}
