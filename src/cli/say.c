/* say.c - what commands say of a wrong command line and of a failure, and numbers on command lines. */
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/param.h"
#include "base/text.h"
#include "cli/cli.h"

/* Messages repeat words of files and command lines, so they are cleaned. */
static void say_print_message(const char *command, const char *format, va_list args)
{
    char *text;
    if (vasprintf(&text, format, args) < 0)
        text = NULL;
    if (text)
        tly_text_clean(text);
    fprintf(stderr, "tally %s: %s\n", command, text ? text : "out of memory");
    free(text);
}

void tly_cli_say(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say_print_message(command, format, args);
    va_end(args);
}

int tly_cli_misuse(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say_print_message(command, format, args);
    va_end(args);
    fprintf(stderr, "`tally %s --help` says more.\n", command);
    return CLI_USAGE;
}

int(tly_cli_fail)(const char *command, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say_print_message(command, format, args);
    va_end(args);
    return CLI_FAILED;
}

long tly_cli_number(const char *text, long lowest, long highest)
{
    double number;
    bool digits = tly_digits(&text, false, &number) && !*text;
    return digits && number >= (double)lowest && number <= (double)highest ? (long)number : -1;
}
