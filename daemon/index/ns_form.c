/* What an identity says of its blocks' bytes. */
#include "daemon/index/ns_form.h"

#include "daemon/format/bytes.h"
#include "daemon/index/internal.h"

#include <stdio.h>
#include <string.h>

#define DTYPE "encoded"
#define LAYOUT "encoding/"
#define SPEC_AT (UCM_FINGERPRINT_BYTES + 8)

_Static_assert(NS_ENCODED_SALT_BYTES == SPEC_AT + UCM_ENCODING_IDENTITY_BYTES, "the salt's parts");

void ns_encoded_identity(const struct ns *base, const struct ucm_encoding_spec *spec,
                         struct ns_encoded_memory *m, struct ns_identity *out)
{
    struct ns_identity id = base->identity;

    snprintf(m->layout, sizeof(m->layout), LAYOUT "%u/%s", spec->version,
             ucm_encoding_method(spec->encoding)->name);
    memcpy(m->salt, base->fingerprint, UCM_FINGERPRINT_BYTES);
    put64(m->salt + UCM_FINGERPRINT_BYTES, base->identity.layer_bytes);
    ucm_encoding_identity(spec, m->salt + SPEC_AT);
    id.dtype = DTYPE;
    id.layout = m->layout;
    id.layer_bytes = ucm_encoding_layer_bytes(spec);
    id.salt = m->salt;
    id.salt_bytes = sizeof(m->salt);
    *out = id;
}

bool ns_encoded(const struct ns_identity *id, struct ns_encoded *out)
{
    const char *name;
    unsigned version;
    int n = 0;

    if (strcmp(id->dtype, DTYPE) != 0 || id->salt_bytes != NS_ENCODED_SALT_BYTES ||
        sscanf(id->layout, LAYOUT "%u/%n", &version, &n) != 1 || n == 0)
        return false;
    name = id->layout + n;
    *out = (struct ns_encoded){.encoding = name,
                               .version = version,
                               .base = id->salt,
                               .raw_layer_bytes = get64(id->salt + UCM_FINGERPRINT_BYTES)};
    return true;
}

/* False: it says nothing that this daemon can decode. */
static bool codec_read(const struct ns_identity *id, struct codec *out)
{
    struct ucm_encoding_spec spec;
    struct ns_encoded said;

    if (!ns_encoded(id, &said) || ucm_encoding_parse(id->salt + SPEC_AT, &spec) != 0 ||
        strcmp(said.encoding, ucm_encoding_method(spec.encoding)->name) != 0 ||
        said.version != spec.version || ucm_encoding_layer_bytes(&spec) != id->layer_bytes ||
        ucm_encoding_raw_layer_bytes(&spec) != said.raw_layer_bytes)
        return false;
    codec_init(out, &spec);
    return true;
}

struct forms {
    struct codec codec;
    struct form form[];
};

size_t ns_forms_bytes(const struct ns_identity *id)
{
    return sizeof(struct forms) + id->parts * sizeof(struct form);
}

const struct form *ns_forms_fill(void *memory, const struct ns_identity *id)
{
    struct forms *forms = memory;
    const struct codec *codec = codec_read(id, &forms->codec) ? &forms->codec : NULL;

    for (uint32_t part = 0; part < id->parts; part++)
        forms->form[part] = (struct form){
            .layer_bytes = id->layer_bytes, .layers = id->layers[part], .codec = codec};
    return forms->form;
}
