/* param.c - settings: read from arguments, environment and file, checked, hashed.  Everything about a setting comes from the
 * table in param.h and the rules below.  param_print.c prints them. */
#include "base/param.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "base/param_rows.h"

#define DEFAULT_STR(d) .text = d
#define DEFAULT_INT(d) .number = d
#define DEFAULT_SIZE(d) .number = d
#define DEFAULT_RATE(d) .number = d
#define DEFAULT_SECS(d) .number = d
#define ROW(name_, type_, field_, default_, min_, max_, agreed_, help_) \
    {.name = #name_, \
     .type = (type_), \
     .offset = offsetof(struct tly_params, field_), \
     DEFAULT_##type_(default_), \
     .min = (min_), \
     .max = (max_), \
     .agreed = (agreed_), \
     .help = (help_)},
const struct tly_param_row tly_param_rows[] = {TLY_PARAM_TABLE(ROW)};

static const struct tly_param_rule rules[] = {
    {"TALLY_LOG", .choices = (const char *const[]){"off", "error", "warning", "info", "debug", NULL}},
    {"TALLY_PART_BYTES", .multiple = 64},
    {"TALLY_FRAGMENT_BYTES", .multiple = 64},
    {"TALLY_LOCAL", .choices = (const char *const[]){"on", "off", NULL}},
    {"TALLY_MEASURE", .choices = (const char *const[]){"unknown", "all", "off", NULL}},
    {"TALLY_SPLIT", .choices = (const char *const[]){"optimal", "all-reduce", "server", NULL}},
    {"TALLY_COORD_FROM", .hidden = true},
    {"TALLY_RANK", .hidden = true},
    {"TALLY_BESIDE", .hidden = true},
    {"TALLY_MEASURED", .hidden = true},
    {"TALLY_SHARED_LOG", .hidden = true},
    {"TALLY_SECRET", .secret = true, .shortest = 16},
};

const struct tly_param_rule *tly_param_rule_of(const struct tly_param_row *row)
{
    static const struct tly_param_rule none;
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (strcmp(rules[i].name, row->name) == 0)
            return &rules[i];
    return &none;
}

static const struct tly_param_row *param_find_row(const char *name, size_t len)
{
    for (int i = 0; i < TLY_PARAM_ROWS; i++)
        if (strlen(tly_param_rows[i].name) == len && memcmp(tly_param_rows[i].name, name, len) == 0)
            return &tly_param_rows[i];
    return NULL;
}

/* --- reading --------------------------------------------------------------------------------- */

struct reader {
    struct tly_params *p;
    char *why;
    size_t why_len;
    char origin[256]; /* where the name stands, for the sentence; "" if the name says enough */
};

__attribute__((format(printf, 3, 4))) static int param_refuse(struct reader *r, int err, const char *format,
                                                              ...)
{
    va_list args;
    va_start(args, format);
    int at = r->origin[0] ? snprintf(r->why, r->why_len, "%s: ", r->origin) : 0;
    if (at >= 0 && (size_t)at < r->why_len)
        vsnprintf(r->why + at, r->why_len - (size_t)at, format, args);
    va_end(args);
    return -err;
}

/* Changes that make a of b: letters put in, left out, replaced, or two neighbours swapped. */
static int param_distance(const char *a, size_t la, const char *b, size_t lb)
{
    enum { LONGEST = 48 };
    int d[3][LONGEST + 1]; /* the last rows of the usual matrix */
    if (la > LONGEST || lb > LONGEST)
        return LONGEST;
    for (size_t j = 0; j <= lb; j++)
        d[0][j] = (int)j;
    for (size_t i = 1; i <= la; i++) {
        int *row = d[i % 3], *above = d[(i + 2) % 3], *above2 = d[(i + 1) % 3];
        row[0] = (int)i;
        for (size_t j = 1; j <= lb; j++) {
            int best = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (above[j] + 1 < best)
                best = above[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && above2[j - 2] + 1 < best)
                best = above2[j - 2] + 1;
            row[j] = best;
        }
    }
    return d[la % 3][lb];
}

static size_t param_prefix_len(const char *name, size_t len)
{
    return len >= 6 && strncasecmp(name, "TALLY_", 6) == 0 ? 6 : 0;
}

/* Unlikeness of a name to a row's, TALLY_ left aside; at most 1 when one begins the other. */
static int param_unlike(const char *name, size_t len, const struct tly_param_row *row)
{
    char word[64];
    size_t skip = param_prefix_len(name, len), n = len - skip, m = strlen(row->name) - 6;
    if (n >= sizeof word)
        return 64;
    for (size_t i = 0; i < n; i++) /* lower case is a slip too */
        word[i] =
            (char)(name[skip + i] >= 'a' && name[skip + i] <= 'z' ? name[skip + i] - 32 : name[skip + i]);
    size_t shorter = n < m ? n : m;
    if (shorter >= 3 && n != m && memcmp(word, row->name + 6, shorter) == 0)
        return 1;
    return param_distance(word, n, row->name + 6, m);
}

static int param_refuse_name(struct reader *r, const char *name, size_t len)
{
    char near[128] = ""; /* room for three of the longest */
    size_t at = 0;
    int found = 0;
    for (int want = 0; want <= 3; want++) {
        for (int i = 0; i < TLY_PARAM_ROWS && found < 3; i++) {
            if (param_unlike(name, len, &tly_param_rows[i]) != want ||
                want * 3 > (int)strlen(tly_param_rows[i].name) - 6)
                continue;
            at += (size_t)snprintf(near + at, sizeof near - at, "%s%s", found++ ? " or " : "",
                                   tly_param_rows[i].name);
        }
        if (found)
            break;
    }
    if (found)
        return param_refuse(r, EINVAL, "unknown setting %.*s; did you mean %s?", (int)len, name, near);
    return param_refuse(r, EINVAL, "unknown setting %.*s; `tally params` lists the valid ones", (int)len,
                        name);
}

/* The text of a number as people write it, with letters each worth `step` times the last: 1048576 is 1M. */
static const char *param_unit_text(uint64_t number, unsigned step, const char *unit, char buf[32])
{
    int u = -1;
    while (number && number % step == 0 && unit[u + 1]) {
        number /= step;
        u++;
    }
    snprintf(buf, 32, u < 0 ? "%llu" : "%llu%c", (unsigned long long)number, u < 0 ? 0 : unit[u]);
    return buf;
}

const char *tly_param_size_text(uint64_t bytes, char buf[32])
{
    return param_unit_text(bytes, 1024, "KMGT", buf);
}

/* A rate of 0 is none. */
static const char *param_rate_text(uint64_t rate, char buf[32])
{
    buf[0] = '\0';
    return rate ? param_unit_text(rate, 1000, "kMGT", buf) : buf;
}

const char *tly_param_number_text(enum tly_param_type type, double x, char buf[32])
{
    if (type == SIZE)
        return tly_param_size_text((uint64_t)x, buf);
    if (type == RATE)
        return param_rate_text((uint64_t)x, buf);
    snprintf(buf, 32, "%.10g", x);
    return buf;
}

const char *tly_param_valid_text(const struct tly_param_row *row, char *buf, size_t len)
{
    const struct tly_param_rule *rule = tly_param_rule_of(row);
    char lo[32], hi[32];
    size_t at = 0;
    buf[0] = 0;
    if (rule->choices) {
        for (const char *const *c = rule->choices; *c && at < len; c++)
            at += (size_t)snprintf(buf + at, len - at, "%s%s",
                                   c == rule->choices ? ""
                                   : c[1]             ? ", "
                                                      : " or ",
                                   *c);
    } else if (row->type != STR) {
        at = (size_t)snprintf(buf, len, "%s to %s%s", tly_param_number_text(row->type, row->min, lo),
                              tly_param_number_text(row->type, row->max, hi),
                              row->type == SECS   ? " seconds"
                              : row->type == RATE ? " bit/s"
                                                  : "");
        if (rule->multiple && at < len)
            snprintf(buf + at, len - at, ", a multiple of %u", rule->multiple);
    } else if (rule->shortest) {
        snprintf(buf, len, "at least %u bytes", rule->shortest);
    }
    return buf;
}

bool tly_digits(const char **text, bool point, double *number)
{
    const char *s = *text;
    double x = 0, place = 1;
    bool any = false;
    for (; *s >= '0' && *s <= '9'; s++, any = true)
        x = x * 10 + (*s - '0');
    if (point && *s == '.')
        for (s++; *s >= '0' && *s <= '9'; s++, any = true)
            x += (*s - '0') * (place /= 10);
    *text = s;
    *number = x;
    return any;
}

static bool param_parse_number(enum tly_param_type type, const char *text, double *number)
{
    bool negative = type == INT && *text == '-';
    text += negative;
    if (!tly_digits(&text, type == SECS || type == RATE, number))
        return false;
    *number = negative ? -*number : *number;
    if (type == RATE) {
        static const char unit[] = "kmgt";
        const char *u = *text ? strchr(unit, *text | 32) : NULL;
        for (const char *at = unit; u && at <= u; at++)
            *number *= 1000;
        text += u != NULL;
    }
    if (type == SIZE && *text) {
        static const char unit[] = "KMGT";
        const char *u = strchr(unit, *text >= 'a' && *text <= 'z' ? *text - 32 : *text);
        if (u) {
            *number *= (double)(1ull << 10 * (u - unit + 1));
            text++;
            text += *text == 'i' && (text[1] == 'B' || text[1] == 'b');
        }
        text += *text == 'B' || *text == 'b';
    }
    return !*text;
}

static int param_set_text(const struct tly_param_row *row, struct tly_params *p, const char *text)
{
    char **to = tly_param_field(p, row), *copy = text ? strdup(text) : NULL;
    if (text && !copy)
        return -ENOMEM;
    free(*to);
    *to = copy;
    return 0;
}

static int param_set_default(const struct tly_param_row *row, struct tly_params *p)
{
    switch (row->type) {
    case STR:
        return param_set_text(row, p, row->text);
    case INT:
        *(int64_t *)tly_param_field(p, row) = (int64_t)row->number;
        break;
    case SIZE:
    case RATE:
        *(uint64_t *)tly_param_field(p, row) = (uint64_t)row->number;
        break;
    case SECS:
        *(double *)tly_param_field(p, row) = row->number;
        break;
    }
    return 0;
}

static int param_set_value(struct reader *r, const struct tly_param_row *row, const char *text)
{
    const struct tly_param_rule *rule = tly_param_rule_of(row);
    char valid[256];
    if (!*text)
        return param_set_default(row, r->p) ? param_refuse(r, ENOMEM, "out of memory") : 0;
    if (row->type == STR) {
        const char *word = text;
        if (rule->choices) {
            const char *const *c = rule->choices;
            while (*c && strcasecmp(*c, text) != 0)
                c++;
            word = *c;
        }
        if (rule->secret && strlen(text) < rule->shortest)
            return param_refuse(r, EINVAL, "%s is too short: %s", row->name,
                                tly_param_valid_text(row, valid, sizeof valid));
        if (!word)
            return param_refuse(r, EINVAL, "%s=%.200s is not valid: %s", row->name, text,
                                tly_param_valid_text(row, valid, sizeof valid));
        return param_set_text(row, r->p, word) ? param_refuse(r, ENOMEM, "out of memory") : 0;
    }
    double number; /* exact: no row goes as far as 2^53 */
    if (!param_parse_number(row->type, text, &number))
        return param_refuse(r, EINVAL, "%s=%.200s is no %s: %s", row->name, text,
                            row->type == SIZE   ? "size"
                            : row->type == RATE ? "rate"
                            : row->type == SECS ? "time"
                                                : "number",
                            tly_param_valid_text(row, valid, sizeof valid));
    if (number < row->min || number > row->max || (rule->multiple && (uint64_t)number % rule->multiple))
        return param_refuse(r, EINVAL, "%s=%.200s is out of range: %s", row->name, text,
                            tly_param_valid_text(row, valid, sizeof valid));
    if (row->type == INT)
        *(int64_t *)tly_param_field(r->p, row) = (int64_t)number;
    else if (row->type == SIZE || row->type == RATE)
        *(uint64_t *)tly_param_field(r->p, row) = (uint64_t)(number + 0.5);
    else
        *(double *)tly_param_field(r->p, row) = number;
    return 0;
}

/* "NAME=value" */
static int param_set_pair(struct reader *r, const char *pair)
{
    const char *eq = strchr(pair, '=');
    if (!eq)
        return param_refuse(r, EINVAL, "\"%.200s\" is not of the form NAME=value", pair);
    const struct tly_param_row *row = param_find_row(pair, (size_t)(eq - pair));
    return row ? param_set_value(r, row, eq + 1) : param_refuse_name(r, pair, (size_t)(eq - pair));
}

static char *param_trim(char *s)
{
    static const char blank[] = " \t\r\n";
    s += strspn(s, blank);
    size_t len = strlen(s);
    while (len && strchr(blank, s[len - 1]))
        s[--len] = 0;
    return s;
}

static int param_read_config(struct reader *r, const char *path)
{
    char *line = NULL;
    size_t room = 0;
    int number = 0, rc = 0;
    FILE *file = fopen(path, "re");
    if (!file) {
        rc = errno;
        return param_refuse(r, rc, "cannot open TALLY_CONFIG=%s: %s", path, strerror(rc));
    }
    while (rc == 0 && getline(&line, &room, file) >= 0) {
        char *pair = param_trim(line), *eq = strchr(pair, '=');
        snprintf(r->origin, sizeof r->origin, "%.200s, line %d", path, ++number);
        if (!*pair || *pair == '#')
            continue;
        if (!eq) {
            rc = param_refuse(r, EINVAL, "a line must be NAME=value, a comment that starts with #, or empty");
            break;
        }
        *eq = 0; /* blanks around = are no part of either side */
        const char *name = param_trim(pair), *value = param_trim(eq + 1);
        const struct tly_param_row *row = param_find_row(name, strlen(name));
        struct stat st;
        if (!row)
            rc = param_refuse_name(r, name, strlen(name));
        else if (strcmp(name, "TALLY_CONFIG") == 0)
            rc = param_refuse(r, EINVAL, "a configuration file cannot name another");
        else if (tly_param_rule_of(row)->secret && fstat(fileno(file), &st) == 0 && (st.st_mode & 077))
            rc = param_refuse(r, EINVAL, "a file that holds %s must be its owner's alone: chmod 600 %s", name,
                              path);
        else
            rc = param_set_value(r, row, value);
    }
    if (rc == 0 && ferror(file))
        rc = param_refuse(r, EIO, "cannot read %s", path);
    free(line);
    fclose(file);
    r->origin[0] = 0;
    return rc;
}

/* The environment that setenv() changes.  A program that names `environ` has a copy of the variable; where we were loaded
 * with RTLD_DEEPBIND (as MPItrampoline does) our own reference is to libc's, which stays as it was at first. */
static char **param_environment(void)
{
    extern char **environ;
    void *program = dlopen(NULL, RTLD_LAZY);
    char ***copy = program ? dlsym(program, "environ") : NULL;
    char **variables = copy ? *copy : environ;
    if (program)
        dlclose(program);
    return variables;
}

int tly_params_load(struct tly_params *p, const char *const settings[], char *why, size_t why_len)
{
    struct tly_params fresh = {0};
    char nothing[1];
    struct reader r = {.p = &fresh, .why = why ? why : nothing, .why_len = why ? why_len : 1};
    const char *config = getenv("TALLY_CONFIG");
    int rc = 0;
    for (int i = 0; i < TLY_PARAM_ROWS; i++)
        if (param_set_default(&tly_param_rows[i], &fresh)) {
            rc = param_refuse(&r, ENOMEM, "out of memory");
            goto fail;
        }
    for (int i = 0; settings && settings[i]; i++)
        if (strncmp(settings[i], "TALLY_CONFIG=", 13) == 0)
            config = settings[i] + 13;
    if (config && *config && (rc = param_read_config(&r, config)))
        goto fail;
    for (char **e = param_environment(); e && *e; e++)
        if (strncmp(*e, "TALLY_", 6) == 0 && (rc = param_set_pair(&r, *e)))
            goto fail;
    for (int i = 0; settings && settings[i]; i++)
        if ((rc = param_set_pair(&r, settings[i])))
            goto fail;
    *p = fresh;
    return 0;
fail:
    tly_params_finish(&fresh);
    return rc;
}

void tly_params_finish(struct tly_params *p)
{
    if (!p)
        return;
    for (int i = 0; i < TLY_PARAM_ROWS; i++) {
        if (tly_param_rows[i].type == STR) {
            char **text = tly_param_field(p, &tly_param_rows[i]);
            free(*text);
            *text = NULL;
        }
    }
}

/* --- agreeing -------------------------------------------------------------------------------- */

void tly_param_value_text(const struct tly_params *p, const struct tly_param_row *row, char *buf, size_t len)
{
    switch (row->type) {
    case STR: {
        const char *text = *(char **)tly_param_field(p, row);
        snprintf(buf, len, "%s", !text ? "" : tly_param_rule_of(row)->secret ? "(set)" : text);
        break;
    }
    case INT:
        snprintf(buf, len, "%lld", (long long)*(int64_t *)tly_param_field(p, row));
        break;
    case SIZE:
        snprintf(buf, len, "%llu", (unsigned long long)*(uint64_t *)tly_param_field(p, row));
        break;
    case RATE: {
        char text[32];
        snprintf(buf, len, "%s", param_rate_text(*(uint64_t *)tly_param_field(p, row), text));
        break;
    }
    case SECS:
        snprintf(buf, len, "%.10g", *(double *)tly_param_field(p, row));
        break;
    }
}

const char *tly_release = TALLY_VERSION;

int tly_params_agreed_text(const struct tly_params *p, char *buf, size_t len)
{
    char value[512];
    const char *patch = strrchr(tly_release, '.');
    size_t at = (size_t)snprintf(buf, len, "Tally %.*s", patch ? (int)(patch - tly_release) : 0, tly_release);
    for (int i = 0; i < TLY_PARAM_ROWS; i++) {
        if (!tly_param_rows[i].agreed)
            continue;
        tly_param_value_text(p, &tly_param_rows[i], value, sizeof value);
        at += (size_t)snprintf(at < len ? buf + at : NULL, at < len ? len - at : 0, " %s=%s",
                               tly_param_rows[i].name, value);
    }
    return (int)at;
}

/* FNV-1a, 64 bits: against slips of people, not against adversaries. */
uint64_t tly_params_digest(const struct tly_params *p)
{
    char text[4096];
    uint64_t hash = 0xcbf29ce484222325u;
    tly_params_agreed_text(p, text, sizeof text);
    for (const char *s = text; *s; s++)
        hash = (hash ^ (unsigned char)*s) * 0x100000001b3u;
    return hash;
}
