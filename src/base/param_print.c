/* param_print.c - the settings as a table, JSON or a manual page; for the command alone. */
#include <ctype.h>
#include <stdio.h>

#include "base/param.h"
#include "base/param_rows.h"
#include "base/text.h"

static void param_default_text(const struct tly_param_row *row, char *buf, size_t len)
{
    char number[32];
    snprintf(buf, len, "%s",
             row->type == STR ? (row->text ? row->text : "")
                              : tly_param_number_text(row->type, row->number, number));
}

static void param_print_table(FILE *out, const struct tly_params *p)
{
    char value[512], size[32], valid[256];
    fprintf(out, "%-22s %-14s %-34s %s\n", "NAME", p ? "VALUE" : "DEFAULT", "VALID", "MEANING");
    for (int i = 0; i < TLY_PARAM_ROWS; i++) {
        const struct tly_param_row *row = &tly_param_rows[i];
        if (tly_param_rule_of(row)->hidden)
            continue;
        if (!p)
            param_default_text(row, value, sizeof value);
        else if (row->type == SIZE)
            snprintf(value, sizeof value, "%s",
                     tly_param_size_text(*(uint64_t *)tly_param_field(p, row), size));
        else
            tly_param_value_text(p, row, value, sizeof value);
        tly_text_clean(value);
        tly_param_valid_text(row, valid, sizeof valid);
        fprintf(out, "%-22s %-14s %-34s %s%s\n", row->name, *value ? value : "-", *valid ? valid : "text",
                row->help, row->agreed ? " (the same on all ranks)" : "");
    }
}

void tly_json_text(FILE *out, const char *s)
{
    fputc('"', out);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\')
            fprintf(out, "\\%c", *s);
        else if ((unsigned char)*s < 0x20)
            fprintf(out, "\\u%04x", *s);
        else
            fputc(*s, out);
    }
    fputc('"', out);
}

static void param_print_json(FILE *out, const struct tly_params *p)
{
    static const char *const types[] = {"text", "number", "bytes", "bits_per_s", "seconds"};
    char value[4096];
    fprintf(out, "[");
    for (int i = 0; i < TLY_PARAM_ROWS; i++) {
        const struct tly_param_row *row = &tly_param_rows[i];
        const struct tly_param_rule *rule = tly_param_rule_of(row);
        if (rule->hidden)
            continue;
        fprintf(out, "%s\n  {\"name\": \"%s\", \"kind\": \"%s\", \"default\": ", i ? "," : "", row->name,
                types[row->type]);
        if (row->type == RATE && row->number == 0)
            fprintf(out, "null, \"min\": %.17g, \"max\": %.17g", row->min, row->max);
        else if (row->type != STR)
            fprintf(out, "%.17g, \"min\": %.17g, \"max\": %.17g", row->number, row->min, row->max);
        else if (row->text)
            tly_json_text(out, row->text);
        else
            fprintf(out, "null");
        if (rule->multiple)
            fprintf(out, ", \"multiple\": %u", rule->multiple);
        for (const char *const *c = rule->choices; c && *c; c++)
            fprintf(out, "%s\"%s\"%s", c == rule->choices ? ", \"choices\": [" : ", ", *c, c[1] ? "" : "]");
        if (p) {
            tly_param_value_text(p, row, value, sizeof value);
            fprintf(out, ", \"value\": ");
            if (row->type == RATE && *value)
                fprintf(out, "%llu", (unsigned long long)*(uint64_t *)tly_param_field(p, row));
            else if (row->type != STR && row->type != RATE)
                fprintf(out, "%s", value);
            else if (row->type == STR && *(char **)tly_param_field(p, row))
                tly_json_text(out, value);
            else
                fprintf(out, "null");
        }
        fprintf(out, ", \"agreed\": %s, \"help\": ", row->agreed ? "true" : "false");
        tly_json_text(out, row->help);
        fprintf(out, "}");
    }
    fprintf(out, "\n]\n");
}

static void param_print_troff_text(FILE *out, const char *s)
{
    if (*s == '.' || *s == '\'')
        fputs("\\&", out);
    for (; *s; s++) {
        if (*s == '-')
            fputs("\\-", out);
        else if (*s == '\\')
            fputs("\\e", out);
        else if (*s == '^')
            fputs("\\(ha", out);
        else
            fputc(*s, out);
    }
}

static void param_print_troff(FILE *out)
{
    char text[256];
    fputs(".TH TALLY\\-PARAMS 7 \"\" \"Tally " TALLY_VERSION "\" \"Tally\"\n"
          ".SH NAME\ntally\\-params \\- settings of Tally\n"
          ".SH DESCRIPTION\n"
          "Every setting can be given, in falling order of precedence, in the list of settings that\n"
          ".BR tally_comm_open (3)\ntakes, as an environment variable, or as a line\n"
          ".IB NAME = value\nof the configuration file that\n.B TALLY_CONFIG\nnames, in which lines that "
          "start with\n"
          ".B #\nare comments.\nAn empty value stands for the default.\n"
          "A name that starts with\n.B TALLY_\nand is not listed here is refused, and so is a value out of "
          "range.\n"
          ".PP\nSizes are in bytes and may end in\n.BR K ,\n.BR M ,\n.B G\nor\n.BR T ,\n"
          "powers of 1024.\nRates are in bit/s and may end in\n.BR k ,\n.BR M ,\n.B G\nor\n.BR T ,\n"
          "powers of 1000.\nTimes are in seconds and may have a decimal point.\n"
          ".PP\nRanks compare the settings that must be the same everywhere when they join, and refuse to "
          "start with\n"
          "a sentence that names them where they differ.\n"
          ".PP\n.BR \"tally params\" \" prints this list with the values in force.\"\n"
          ".SH SETTINGS\n",
          out);
    for (int i = 0; i < TLY_PARAM_ROWS; i++) {
        const struct tly_param_row *row = &tly_param_rows[i];
        if (tly_param_rule_of(row)->hidden)
            continue;
        snprintf(text, sizeof text, "%s", row->help);
        text[0] = (char)toupper((unsigned char)text[0]);
        fprintf(out, ".TP\n.B %s\n", row->name);
        param_print_troff_text(out, text);
        fputs(".\n", out);
        tly_param_valid_text(row, text, sizeof text);
        if (*text) {
            fputs("Valid: ", out);
            param_print_troff_text(out, text);
            fputs(".\n", out);
        }
        param_default_text(row, text, sizeof text);
        if (*text) {
            fputs("Default: ", out);
            param_print_troff_text(out, text);
            fputs(".\n", out);
        }
        if (row->agreed)
            fputs("Must be the same on all ranks.\n", out);
    }
    fputs(".SH SEE ALSO\n.BR tally (1),\n.BR tally\\-run (1),\n.BR tallyd (8),\n.BR tally_comm_open (3)\n",
          out);
}

void tly_params_print(FILE *out, const struct tly_params *p, enum tly_params_format format)
{
    switch (format) {
    case TLY_PARAMS_TABLE:
        param_print_table(out, p);
        break;
    case TLY_PARAMS_JSON:
        param_print_json(out, p);
        break;
    case TLY_PARAMS_TROFF:
        param_print_troff(out);
        break;
    }
}
