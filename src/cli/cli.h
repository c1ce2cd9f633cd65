/* cli.h - the commands of `tally`, one function each; main.c has the table. */
#ifndef TLY_CLI_H
#define TLY_CLI_H

/* Exit statuses besides 0; 2 is a wrong command line. */
enum { CLI_FAILED = 1, CLI_USAGE = 2 };

/* argv[0] is the command's name.  They return the exit status; usage texts end with a newline. */
int tly_cli_run(int argc, char **argv);
int tly_cli_plan(int argc, char **argv);
int tly_cli_trace(int argc, char **argv);
int tly_cli_status(int argc, char **argv);
int tly_cli_topo(int argc, char **argv);
extern const char tly_cli_run_usage[];
extern const char tly_cli_plan_usage[];
extern const char tly_cli_status_usage[];
extern const char tly_cli_topo_usage[];
extern const char tly_cli_trace_usage[];

/* --- say.c ---------------------------------------------------------------------------------------------------- */

/* Print "tally COMMAND: message" on standard error, without control characters. */
void tly_cli_say(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Say it, print a hint at --help, and return CLI_USAGE. */
int tly_cli_misuse(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Say it and return CLI_FAILED. */
int tly_cli_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));
#ifdef __clang_analyzer__ /* see base/error.h */
#define tly_cli_fail(...) (tly_cli_fail(__VA_ARGS__), CLI_FAILED)
#endif

/* Digits, and nothing but digits, from lowest to highest, as a number; -1 for anything else. */
long tly_cli_number(const char *text, long lowest, long highest);

/* --- text.c: quantities as people write them ----------------------------------------------------------------- */

/* Bytes, in powers of 1024 with K, M, G, T, also as 100MB and 100MiB; -1: none. */
double tly_cli_size(const char *text);

/* A rate in bit/s from 1k on, in powers of 1000 with k, M, G, T, as TALLY_BANDWIDTH has it; -1: none. */
double tly_cli_rate(const char *text);

/* "25 Gbit/s". */
const char *tly_cli_rate_text(double rate, char text[32]);

/* "7.895 MB", in powers of 1024. */
const char *tly_cli_bytes_text(double bytes, char text[32]);

/* Seconds as s, ms or us. */
const char *tly_cli_time_text(double seconds, char text[32]);

/* "NAME": x and `end`, or null for what is not finite. */
void tly_cli_json_number(const char *name, double x, const char *end);

#endif
