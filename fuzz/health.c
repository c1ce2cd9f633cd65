/* health.c - fuzzes what a tallyd answers to who asks at its port for probes, in pieces as they may come, and where
 * that port may be: every answer is whole HTTP of bounded length, and only GET or HEAD of a known path is a success. */
#include "tallyd/health.h"

#include <string.h>

#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct tly_health_news news = {
        .serving = true, .job = "a \"job\" \\ of\nmine", .ranks = UINT32_MAX};
    char out[TLY_HEALTH_ANSWER], where[300];
    const char *text = (const char *)data;
    struct sockaddr_storage at;

    memset(&news.facts, 0xff, sizeof news.facts); /* the longest numbers */
    memset(&news.before, 0x7f, sizeof news.before);
    size_t most = size < TLY_HEALTH_REQUEST ? size : TLY_HEALTH_REQUEST;
    for (size_t len = 0; len <= most; len = len < 64 || len == most ? len + 1 : most) {
        size_t n = tly_health_answer(text, len, &news, 0.5, out);
        require(n < sizeof out && (n > 0 || len < TLY_HEALTH_REQUEST));
        if (n == 0)
            continue;
        require(memcmp(out, "HTTP/1.0 ", 9) == 0 && memmem(out, n, "\r\n\r\n", 4));
        bool success = out[9] == '2';
        require(!success || memcmp(text, "GET /", 5) == 0 || memcmp(text, "HEAD /", 6) == 0);
        /* What is said does not change with what follows. */
        break;
    }

    snprintf(where, sizeof where, "%.*s", (int)(size < 299 ? size : 299), text);
    if (tly_health_parse(where, &at) == 0)
        require(at.ss_family == AF_INET || at.ss_family == AF_INET6);
    return 0;
}
