/* words.c - see words.h.
 *
 * A word ends at a space that is in no brackets: "[128, 64]" and "(uint32)" are words. */
#include "sum/words.h"

#include <stdio.h>
#include <string.h>

#include "wire/frame.h"

enum { MOST_WORDS = 64 };

struct words {
    struct word {
        const char *at;
        size_t length;
    } word[MOST_WORDS];
    int count; /* the last one is the rest of the text if there are too many */
};

static const char *words_rest_of(const char *text)
{
    const char *end = strrchr(text, TLY_TITLE_END);
    return end ? end + 1 : text;
}

static void words_split(const char *text, struct words *w)
{
    int depth = 0;
    w->count = 0;
    for (const char *at = text; *text; text = *at ? at + 1 : at) {
        for (at = text; *at && (*at != ' ' || depth > 0 || w->count == MOST_WORDS - 1); at++)
            depth += *at == '[' || *at == '(' ? 1 : *at == ']' || *at == ')' ? -1 : 0;
        w->word[w->count++] = (struct word){text, (size_t)(at - text)};
    }
}

static bool words_same(struct word a, struct word b)
{
    return a.length == b.length && memcmp(a.at, b.at, a.length) == 0;
}

/* Does the next word say nothing without this one? */
static bool words_leads(struct word w)
{
    static const char *const leading[] = {"from", "to", "rank", "prescale", "postscale", "list", "staleness"};
    for (size_t i = 0; i < sizeof leading / sizeof *leading; i++)
        if (w.length == strlen(leading[i]) && memcmp(w.at, leading[i], w.length) == 0)
            return true;
    return false;
}

/* The words of `text` from the first to the last that differs; all of them if none is left. */
static void words_cut(const char *first, const char *text, const char **from, size_t *length)
{
    struct words f, t;
    words_split(first, &f);
    words_split(text, &t);
    int before = 0, behind = 0;
    while (before < f.count && before < t.count && words_same(f.word[before], t.word[before]))
        before++;
    while (behind < f.count - before && behind < t.count - before - 1 &&
           words_same(f.word[f.count - 1 - behind], t.word[t.count - 1 - behind]))
        behind++;
    while (before < t.count && before > 0 && words_leads(t.word[before - 1]))
        before--;
    if (before == t.count) {
        *from = text;
        *length = strlen(text);
        return;
    }
    struct word last = t.word[t.count - 1 - behind];
    *from = t.word[before].at;
    *length = (size_t)(last.at - *from) + last.length;
}

bool tly_words_same_title(const char *a, const char *b)
{
    const char *end = strrchr(a, TLY_TITLE_END);
    return end && strncmp(a, b, (size_t)(end - a) + 1) == 0 && strrchr(b, TLY_TITLE_END) == b + (end - a);
}

size_t tly_words_append(char *out, size_t len, size_t at, const char *first, const char *text,
                        const char *ranks, bool whole)
{
    const char *rest = words_rest_of(text);
    size_t length = strlen(rest);
    if (at >= len)
        return at;
    if (whole) {
        int title = rest > text ? (int)(rest - 1 - text) : 0;
        return at + (size_t)snprintf(out + at, len - at, "%s%s: %.*s%s%s", first ? "; " : "", ranks, title,
                                     text, title && *rest ? ": " : "", rest);
    }
    if (first)
        words_cut(words_rest_of(first), rest, &rest, &length);
    return at +
           (size_t)snprintf(out + at, len - at, "%s%.*s on %s", first ? ", " : "", (int)length, rest, ranks);
}
