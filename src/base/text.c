/* text.c - quantities in words, and texts that a terminal may get. */
#include "base/text.h"

#include <stdio.h>

const char *tly_bytes_text(uint64_t bytes, char text[TLY_BYTES_TEXT])
{
    static const char *const units[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
    double x = (double)bytes;
    int unit = 0;
    for (; x >= 999.5 && unit < 6; unit++)
        x /= 1000;
    snprintf(text, TLY_BYTES_TEXT, "%.3g %s", x, units[unit]);
    return text;
}

const char *tly_number_text(double x, char text[TLY_NUMBER_TEXT])
{
    snprintf(text, TLY_NUMBER_TEXT, x < 999.5 ? "%.3g" : "%.0f", x);
    return text;
}

size_t tly_text_append_range(char *out, size_t len, size_t at, uint32_t first, uint32_t last)
{
    const char *comma = at ? ", " : "";
    if (at + 32 >= len)
        return at;
    if (last > first)
        return at + (size_t)snprintf(out + at, len - at, "%s%u-%u", comma, first, last);
    return at + (size_t)snprintf(out + at, len - at, "%s%u", comma, first);
}

bool tly_text_clean(char *text)
{
    bool found = false;
    for (unsigned char *s = (unsigned char *)text; *s; s++) {
        bool two = s[0] == 0xc2 && s[1] >= 0x80 && s[1] < 0xa0; /* U+0080 to U+009F */
        if (!two && *s >= 0x20 && *s != 0x7f)
            continue;
        found = true;
        *s = '?';
        if (two)
            *++s = '?';
    }
    return found;
}
