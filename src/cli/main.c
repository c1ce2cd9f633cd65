/* main.c - the `tally` command: a table of commands, and those of them that are only a few lines. */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/param.h"

/* --- params ---------------------------------------------------------------------------------- */

static const char params_usage[] =
    "usage: tally params [--json | --man]\n"
    "\n"
    "Lists the settings and their current values, from the environment, the configuration file\n"
    "and the defaults.\n"
    "\n"
    "  --json   as JSON\n"
    "  --man    as the manual page tally-params(7), without values\n";

static int main_params(int argc, char **argv)
{
    static const struct option options[] = {{"json", no_argument, NULL, 'j'},
                                            {"man", no_argument, NULL, 'm'},
                                            {"help", no_argument, NULL, 'h'},
                                            {0}};
    enum tly_params_format format = TLY_PARAMS_TABLE;
    for (int c; (c = getopt_long(argc, argv, "+h", options, NULL)) != -1;) {
        switch (c) {
        case 'j':
            format = TLY_PARAMS_JSON;
            break;
        case 'm':
            format = TLY_PARAMS_TROFF;
            break;
        case 'h':
            fputs(params_usage, stdout);
            return 0;
        default:
            return CLI_USAGE;
        }
    }
    if (optind < argc)
        return tly_cli_misuse("params", "unexpected argument %s", argv[optind]);
    if (format == TLY_PARAMS_TROFF) {
        tly_params_print(stdout, NULL, format);
        return 0;
    }
    struct tly_params p;
    char why[1024];
    if (tly_params_load(&p, NULL, why, sizeof why) < 0)
        return tly_cli_fail("params", "%s", why);
    tly_params_print(stdout, &p, format);
    tly_params_finish(&p);
    return 0;
}

/* --- secret ---------------------------------------------------------------------------------- */

static const char secret_usage[] =
    "usage: tally secret [FILE]\n"
    "\n"
    "Prints a new random job secret (32 bytes in hexadecimal), or writes it to a new FILE that\n"
    "only its owner can read.  Missing folders are created.  All processes of a job need the same\n"
    "secret: in TALLY_SECRET, in the file that TALLY_SECRET_FILE names, or in\n"
    "~/.config/tally/secret.\n";

static int main_make_folders(const char *file)
{
    char *path = strdup(file);
    int rc = path ? 0 : -ENOMEM;
    for (char *s = path ? strchr(path + 1, '/') : NULL; s && rc == 0; s = strchr(s + 1, '/')) {
        *s = 0;
        if (mkdir(path, 0700) < 0 && errno != EEXIST)
            rc = -errno;
        *s = '/';
    }
    free(path);
    return rc;
}

static int main_secret(int argc, char **argv)
{
    static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {0}};
    for (int c; (c = getopt_long(argc, argv, "+h", options, NULL)) != -1;) {
        if (c != 'h')
            return CLI_USAGE;
        fputs(secret_usage, stdout);
        return 0;
    }
    if (argc - optind > 1)
        return tly_cli_misuse("secret", "unexpected argument %s", argv[optind + 1]);
    unsigned char bytes[32];
    char text[2 * sizeof bytes + 1];
    if (sodium_init() < 0)
        return tly_cli_fail("secret", "no source of random numbers");
    randombytes_buf(bytes, sizeof bytes);
    sodium_bin2hex(text, sizeof text, bytes, sizeof bytes);
    if (optind == argc) {
        puts(text);
        return 0;
    }
    const char *file = argv[optind];
    int rc = main_make_folders(file);
    int fd = rc ? -1 : open(file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return tly_cli_fail("secret", "cannot create %s: %s", file, strerror(rc ? -rc : errno));
    text[sizeof text - 1] = '\n';
    bool written = write(fd, text, sizeof text) == (ssize_t)sizeof text && fsync(fd) == 0;
    rc = errno;
    if (close(fd) < 0 || !written) {
        unlink(file);
        return tly_cli_fail("secret", "cannot write %s: %s", file, strerror(rc));
    }
    return 0;
}

/* --- the table ------------------------------------------------------------------------------- */

static int main_version(int argc, char **argv);
static int main_help(int argc, char **argv);
static const char version_usage[] = "usage: tally version\n\nPrints the release.\n";
static const char help_usage[] =
    "usage: tally help [COMMAND]\n\nLists the commands, or prints the usage of one.\n";

static const struct main_command {
    const char *name, *summary, *usage;
    int (*main)(int argc, char **argv);
} commands[] = {
    {"run", "start ranks and summation services on this machine", tly_cli_run_usage, tly_cli_run},
    {"plan", "predict which machine sums how much, and the time", tly_cli_plan_usage, tly_cli_plan},
    {"topo", "draw this machine, and predict how its GPUs sum", tly_cli_topo_usage, tly_cli_topo},
    {"status", "show the state of a running job", tly_cli_status_usage, tly_cli_status},
    {"trace", "merge the timelines of a job, or summarize them", tly_cli_trace_usage, tly_cli_trace},
    {"params", "list the settings and their values", params_usage, main_params},
    {"secret", "make a job secret", secret_usage, main_secret},
    {"version", "print the release", version_usage, main_version},
    {"help", "print the usage of a command", help_usage, main_help},
};
enum { COMMANDS = sizeof commands / sizeof commands[0] };

static const struct main_command *main_find_command(const char *name)
{
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

static void main_print_overview(FILE *out)
{
    fputs("usage: tally COMMAND [ARGUMENT...]\n\n", out);
    for (int i = 0; i < COMMANDS; i++)
        fprintf(out, "  %-9s %s\n", commands[i].name, commands[i].summary);
    fputs("\n`tally COMMAND --help` prints the usage of a command.\n", out);
}

static int main_unknown(const char *name)
{
    fprintf(stderr, "tally: there is no command \"%s\"\n", name);
    main_print_overview(stderr);
    return CLI_USAGE;
}

static int main_version(int argc, char **argv)
{
    puts("tally " TALLY_VERSION);
    return 0;
}

static int main_help(int argc, char **argv)
{
    if (argc < 2) {
        main_print_overview(stdout);
        return 0;
    }
    const struct main_command *c = main_find_command(argv[1]);
    if (!c)
        return main_unknown(argv[1]);
    fputs(c->usage, stdout);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        main_print_overview(stderr);
        return CLI_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        name = "help";
    else if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0)
        name = "version";
    const struct main_command *c = main_find_command(name);
    if (!c)
        return main_unknown(name);
    if ((c->main == main_version || c->main == main_help) && argc > 2 && strcmp(argv[2], "--help") == 0) {
        fputs(c->usage, stdout);
        return 0;
    }
    char title[64]; /* getopt's messages begin with it */
    snprintf(title, sizeof title, "tally %s", c->name);
    argv[1] = title;
    int status = c->main(argc - 1, argv + 1);
    if (fflush(stdout) == EOF || ferror(stdout)) { /* a full disk must not look like success */
        fprintf(stderr, "tally: cannot write to standard output: %s\n", strerror(errno));
        return status ? status : CLI_FAILED;
    }
    return status;
}
