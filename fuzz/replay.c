/* replay.c - runs a fuzz target over files and folders of inputs, without a fuzzing engine: the seeds as a test.
 * Speaks TAP, one test a file. */
#include <dirent.h>
#include <string.h>
#include <sys/stat.h>

#include "fuzz.h"

static int count;

static void replay_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    require(file != NULL);
    require(fseek(file, 0, SEEK_END) == 0);
    long size = ftell(file);
    require(size >= 0);
    rewind(file);
    /* Exactly as large as the input, so that a read beyond it is noticed. */
    uint8_t *data = malloc(size > 0 ? (size_t)size : 1);
    require(data != NULL && fread(data, 1, (size_t)size, file) == (size_t)size);
    fclose(file);
    LLVMFuzzerTestOneInput(data, (size_t)size);
    free(data);
    const char *name = strrchr(path, '/');
    printf("ok %d - %s\n", ++count, name ? name + 1 : path);
}

static void replay(const char *path)
{
    struct stat st;
    require(stat(path, &st) == 0);
    if (!S_ISDIR(st.st_mode)) {
        replay_file(path);
        return;
    }
    struct dirent **entries;
    int n = scandir(path, &entries, NULL, alphasort);
    require(n >= 0);
    for (int i = 0; i < n; i++) {
        char inner[4096];
        if (entries[i]->d_name[0] != '.') {
            require(snprintf(inner, sizeof inner, "%s/%s", path, entries[i]->d_name) < (int)sizeof inner);
            replay(inner);
        }
        free(entries[i]);
    }
    free(entries);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* what passed shows even if the next one crashes */
    for (int i = 1; i < argc; i++)
        replay(argv[i]);
    printf("1..%d\n", count);
    return count > 0 ? 0 : 1;
}
