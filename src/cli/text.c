/* text.c - quantities as people write and read them. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/param.h"
#include "cli/cli.h"

/* A positive number and one of the letters, each worth `unit` times the last; sizes (1024) also as 100MB and 100MiB. */
static double text_quantity(const char *text, double unit)
{
    const char *end = text;
    double x;
    if (!tly_digits(&end, true, &x))
        return -1;
    const char *letters = "kmgt", *at = *end ? strchr(letters, *end | 32) : NULL;
    if (at) {
        x *= pow(unit, (double)(at - letters) + 1);
        end++;
        if (unit == 1024)
            end += strcasecmp(end, "iB") == 0 ? 2 : strcasecmp(end, "B") == 0;
    }
    return *end || !(x > 0) || !(x <= 1e18) ? -1 : x;
}

double tly_cli_size(const char *text)
{
    return text_quantity(text, 1024);
}

double tly_cli_rate(const char *text)
{
    double x = text_quantity(text, 1000);
    return x >= 1e3 && x <= 1e15 ? x : -1;
}

const char *tly_cli_rate_text(double rate, char text[32])
{
    static const char *const units[] = {"bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"};
    int u = 0;
    for (; rate >= 1000 && u < 4; u++)
        rate /= 1000;
    snprintf(text, 32, "%.6g %s", rate, units[u]);
    return text;
}

const char *tly_cli_bytes_text(double bytes, char text[32])
{
    static const char *const units[] = {"B", "KB", "MB", "GB", "TB"};
    int u = 0;
    for (; bytes >= 1024 && u < 4; u++)
        bytes /= 1024;
    snprintf(text, 32, u ? "%.4g %s" : "%.0f %s", bytes, units[u]);
    return text;
}

const char *tly_cli_time_text(double seconds, char text[32])
{
    if (seconds >= 1)
        snprintf(text, 32, "%.3f s", seconds);
    else if (seconds >= 1e-3)
        snprintf(text, 32, "%.2f ms", seconds * 1e3);
    else
        snprintf(text, 32, "%.1f us", seconds * 1e6);
    return text;
}

void tly_cli_json_number(const char *name, double x, const char *end)
{
    if (isfinite(x))
        printf("\"%s\": %.12g%s", name, x, end);
    else
        printf("\"%s\": null%s", name, end);
}
