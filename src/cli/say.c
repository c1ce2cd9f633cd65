/* say.c - what commands say of a wrong command line and of a failure, and numbers on command lines. */
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/param.h"
#include "cli/cli.h"

static void print_message(const char *command, const char *format, va_list args)
{
    fprintf(stderr, "tally %s: ", command);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

int tly_cli_misuse(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_message(command, format, args);
    va_end(args);
    fprintf(stderr, "`tally %s --help` says more.\n", command);
    return CLI_USAGE;
}

int(tly_cli_fail)(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_message(command, format, args);
    va_end(args);
    return CLI_FAILED;
}

long tly_cli_number(const char *text, long lowest, long highest)
{
    double number;
    bool digits = tly_digits(&text, false, &number) && !*text;
    return digits && number >= (double)lowest && number <= (double)highest ? (long)number : -1;
}
