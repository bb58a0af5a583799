#include "daemon/backend/s3/credentials_parse.h"

#include "daemon/backend/s3/xml.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

bool s3_text_take(char *to, size_t cap, const char *text)
{
    return snprintf(to, cap, "%s", text) < (int)cap;
}

/* ---- the file ---- */

static char *trimmed(char *text)
{
    char *end;

    while (*text == ' ' || *text == '\t')
        text++;
    end = text + strlen(text);
    while (end > text && strchr(" \t\r", end[-1]))
        *--end = '\0';
    return text;
}

/* One "name = value" of the profile. */
static bool line_take(struct s3_key *key, char *process, size_t process_cap, char *line)
{
    char *value = strchr(line, '=');

    if (!value)
        return true;
    *value++ = '\0';
    line = trimmed(line);
    value = trimmed(value);
    if (strcmp(line, "aws_access_key_id") == 0)
        return s3_text_take(key->id, sizeof(key->id), value);
    if (strcmp(line, "aws_secret_access_key") == 0)
        return s3_text_take(key->secret, sizeof(key->secret), value);
    if (strcmp(line, "aws_session_token") == 0)
        return s3_text_take(key->token, sizeof(key->token), value);
    if (strcmp(line, "credential_process") == 0)
        return s3_text_take(process, process_cap, value);
    return true;
}

bool s3_profile_parse(char *text, const char *profile, struct s3_key *key, char *process,
                      size_t process_cap)
{
    bool within = false, fits = true;
    char head[80];

    snprintf(head, sizeof(head), "[%s]", profile);
    process[0] = '\0';
    for (char *line; fits && (line = strsep(&text, "\n")) != NULL;) {
        line = trimmed(line);
        if (*line == '[')
            within = strcmp(line, head) == 0;
        else if (within && *line != '#' && *line != ';')
            fits = line_take(key, process, process_cap, line);
    }
    return fits;
}

/* ---- the command ---- */

static bool json_text(const cJSON *j, const char *name, char *to, size_t cap)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, name);

    return cJSON_IsString(v) && s3_text_take(to, cap, v->valuestring);
}

static const char *json_take(const cJSON *j, int64_t now_s, struct s3_key *key, int64_t *expires_s)
{
    const cJSON *version = cJSON_GetObjectItemCaseSensitive(j, "Version");
    char text[40] = "";

    if (!cJSON_IsNumber(version) || version->valueint != 1)
        return "it printed no JSON with \"Version\": 1";
    if (!json_text(j, "AccessKeyId", key->id, sizeof(key->id)) ||
        !json_text(j, "SecretAccessKey", key->secret, sizeof(key->secret)))
        return "AccessKeyId or SecretAccessKey is missing, or too long";
    if (cJSON_GetObjectItemCaseSensitive(j, "SessionToken") &&
        !json_text(j, "SessionToken", key->token, sizeof(key->token)))
        return "SessionToken is no text, or too long";
    *expires_s = 0;
    if (!cJSON_GetObjectItemCaseSensitive(j, "Expiration"))
        return NULL;
    if (json_text(j, "Expiration", text, sizeof(text)))
        *expires_s = (int64_t)(s3_time_parse(text) / 1000000000u);
    if (*expires_s == 0)
        return "Expiration is no time like 2026-11-23T18:00:00Z";
    return *expires_s <= now_s ? "what it printed has expired" : NULL;
}

const char *s3_command_parse(const char *text, size_t n, int64_t now_s, struct s3_key *key,
                             int64_t *expires_s)
{
    cJSON *j = cJSON_ParseWithLength(text, n);
    const char *wrong = json_take(j, now_s, key, expires_s);

    cJSON_Delete(j);
    return wrong;
}
