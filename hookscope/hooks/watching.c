/* `GradientWatch.outputs` and `GradientWatch._arrive` of gradient_hooks.py for the usual output: a plain tensor that
 * autograd tracks, that is no view and whose module needs no copies. Any other is left to Python. Why it is compiled: see
 * calls.c.
 */

#include "watching.h"

/* What `self` holds, in the order of `GradientWatch.parts`. DEFINITION is the address of that of `arrive`, ARRIVAL what
 * it holds besides the sites. */
enum { ALIKE, WATCH, OUTPUTS, DEFINITION, ARRIVAL };

/* What `self` of `arrive` holds, and ARRIVAL as GIVEN. */
enum { GIVEN, SITES };
enum { ARRIVAL_ALIKE, ARRIVAL_WATCH, ARRIVE, OBSERVE, ACQUIRE, RELEASE, BYPASS };

/* What is alike for all, in the order of `_ALIKE` in gradient_hooks.py. */
enum {
    TENSOR, SITE, DICT,
    IS_TRANSFORMED, HAS_GRADIENTS, IS_CASTING,
    REQUIRES_GRAD, IS_LEAF, IS_VIEW, HOOKS, NODE, REGISTER, SHAPE, DTYPE,
    OF_SITES, CLONE_AT, HOPELESS, LATEST, ATTACHED, LISTENING, PARTS, ARRIVALS, PLACE, VALUE, ENTER, EXIT,
    NONE, TRUE, FALSE, EMPTY, ROLE
};

/* The items of `ModuleCall` that are used here. */
enum { LAYER, MODULE, NUMBER };

/* The fields of `GradientSite`, and of `GradientWatch._latest`. */
enum { SITE_FIELDS = 8 };
enum { LATEST_REFERENCE, LATEST_VERSION, LATEST_COUNT, LATEST_SITES, LATEST_ITEMS };

#define PART(which) py->item(self, which)
#define SHARED(which) py->item(py->item(self, ALIKE), which)

/* Tell whether a container that an attribute holds is empty. */
static int is_empty(Object *object, Object *name) {
    Object *container = py->attribute(object, name);
    i64 size = container ? py->size(container) : -1;
    if (size < 0) py->clear();
    py->drop(container);
    return size == 0;
}

/* Tell whether a function, given an object, returns another one. */
static int returns(Object *function, Object *given, Object *other) {
    return is(py->call(function, &given, 1, 0), other);
}

/* Tell whether the hook of the tensor that came last is the newest one of this tensor, which is the same. */
static int has_hook(Object *self, Object *latest, Object *tensor, i64 version, i64 hook_count) {
    return latest != SHARED(NONE) && py->value(py->item(latest, LATEST_VERSION)) == version &&
           py->value(py->item(latest, LATEST_COUNT)) == hook_count &&
           is(py->call(py->item(latest, LATEST_REFERENCE), 0, 0, 0), tensor);
}

/* As `GradientWatch._hook`: return the tensor's hooks, with a new one for a list of sites. */
static Object *hooked(Owned *owned, Object *self, Object *tensor, Object *hooks, Object *sites) {
    if (hooks == SHARED(NONE)) {
        hooks = own(owned, py->call(SHARED(DICT), 0, 0, 0));
        if (!hooks || py->set_attribute(tensor, SHARED(HOOKS), hooks)) return 0;
        Object *registered[] = {own(owned, py->attribute(tensor, SHARED(NODE))), tensor};
        if (!registered[0] || !own(owned, py->method(SHARED(REGISTER), registered, 2, 0))) return 0;
    }
    Object *held[] = {PART(ARRIVAL), sites}, *of_hook = tuple_of(owned, held, 2);
    Object *hook = of_hook ? own(owned, py->function((void *)py->value(PART(DEFINITION)), of_hook, 0)) : 0;
    Object *attached[] = {hooks, hook}, *entry = tuple_of(owned, attached, 2);
    Object *all = own(owned, py->attribute(PART(WATCH), SHARED(ATTACHED)));
    if (!entry || !all || py->set_element(hooks, hook, hook) || py->append(all, entry)) return 0;
    return hooks;
}

/* As `GradientWatch._watch`, for a new site. */
static int watch(Owned *owned, Object *self, Object *key, Object *site, Object *tensor, i64 version) {
    Object *sites = own(owned, py->attribute(PART(WATCH), SHARED(OF_SITES)));
    Object *latest = own(owned, py->attribute(PART(WATCH), SHARED(LATEST)));
    Object *hooks = own(owned, py->attribute(tensor, SHARED(HOOKS)));
    if (!sites || !latest || !hooks || py->store(sites, key, site)) return -1;
    i64 count = hooks == SHARED(NONE) ? 0 : py->size(hooks);
    if (has_hook(self, latest, tensor, version, count))
        return py->append(py->item(latest, LATEST_SITES), site) ? -1 : 1;
    Object *of_tensor = list_of(owned, site);
    hooks = of_tensor ? hooked(owned, self, tensor, hooks, of_tensor) : 0;
    if (!hooks) return -1;
    Object *fields[LATEST_ITEMS] = {own(owned, py->reference(tensor, 0)), own(owned, py->integer(version)),
                                    own(owned, py->integer(py->size(hooks))), of_tensor};
    Object *new = tuple_of(owned, fields, LATEST_ITEMS);
    return new && !py->set_attribute(PART(WATCH), SHARED(LATEST), new) ? 1 : -1;
}

int watch_output(Owned *owned, Object *self, Object *made, Object *output, i64 version) {
    if (!is(py->type(output), SHARED(TENSOR)) || !is(py->attribute(output, SHARED(REQUIRES_GRAD)), SHARED(TRUE)) ||
        !is(py->attribute(output, SHARED(IS_LEAF)), SHARED(FALSE)) ||
        !is(py->method(SHARED(IS_VIEW), &output, 1, 0), SHARED(FALSE)) ||
        !returns(SHARED(IS_TRANSFORMED), output, SHARED(FALSE)) || !is_empty(PART(WATCH), SHARED(CLONE_AT)) ||
        !is_empty(PART(WATCH), SHARED(HOPELESS)))
        return 0;
    Object *named[] = {py->item(made, LAYER), py->item(made, NUMBER), SHARED(EMPTY), SHARED(ROLE)};
    Object *key = tuple_of(owned, named, 4), *sites = own(owned, py->attribute(PART(WATCH), SHARED(OF_SITES)));
    if (!key || !sites) return -1;
    if (py->lookup(sites, key)) return 0; /* it is replayed */
    Object *fields[SITE_FIELDS] = {named[0],
                                   py->item(made, MODULE),
                                   named[1],
                                   SHARED(EMPTY),
                                   SHARED(ROLE),
                                   own(owned, py->attribute(output, SHARED(SHAPE))),
                                   own(owned, py->attribute(output, SHARED(DTYPE))),
                                   SHARED(EMPTY)};
    if (!fields[5] || !fields[6]) return -1;
    Object *site = own(owned, py->call(SHARED(SITE), fields, SITE_FIELDS, 0));
    return site ? watch(owned, self, key, site, output, version) : -1;
}

/* Give a site its gradient. */
static int note(Owned *owned, Object *self, Object *site, Object *gradient) {
    Object *known = own(owned, py->attribute(site, SHARED(PLACE)));
    if (known == SHARED(NONE)) {
        Object *place = own(owned, py->attribute(PART(WATCH), SHARED(ARRIVALS)));
        Object *next = place ? own(owned, py->integer(py->value(place) + 1)) : 0;
        if (!next || py->set_attribute(site, SHARED(PLACE), place) ||
            py->set_attribute(PART(WATCH), SHARED(ARRIVALS), next))
            return -1;
    }
    Object *given[] = {site, gradient};
    Object *value = known ? own(owned, py->call(PART(OBSERVE), given, 2, 0)) : 0;
    return value ? py->set_attribute(site, SHARED(VALUE), value) : -1;
}

/* `GradientWatch._arrive`: the hook of a tensor, of the kind METH_FASTCALL. */
EXPORT Object *arrive(Object *held, Object *const *given, i64 count) {
    Object *self = py->item(held, GIVEN), *sites = py->item(held, SITES), *none = SHARED(NONE);
    if (count != 1 || !is(py->type(given[0]), SHARED(TENSOR)) ||
        !is(py->attribute(PART(WATCH), SHARED(LISTENING)), SHARED(TRUE)) || !is_empty(PART(WATCH), SHARED(PARTS)) ||
        !is(py->call(SHARED(HAS_GRADIENTS), 0, 0, 0), SHARED(FALSE)) ||
        !is(py->call(SHARED(IS_CASTING), 0, 0, 0), SHARED(FALSE))) {
        Object *left[] = {sites, count == 1 ? given[0] : none};
        return py->call(PART(ARRIVE), left, 2, 0);
    }
    Object *taken = py->call(PART(ACQUIRE), 0, 0, 0), *bypass = none;
    if (!taken) return 0;
    py->drop(taken);
    Object *exit[] = {0, none, none, none};
    if (PART(BYPASS) != none) {
        bypass = exit[0] = py->call(PART(BYPASS), 0, 0, 0);
        Object *entered = bypass ? py->method(SHARED(ENTER), exit, 1, 0) : 0;
        if (!entered) {
            py->drop(bypass);
            bypass = 0;
        }
        py->drop(entered);
    }
    int failed = !bypass;
    for (i64 at = 0; !failed && at < py->list_length(sites); at++) {
        Owned owned;
        owned.count = 0;
        failed = note(&owned, self, py->list_item(sites, at), given[0]);
        give_back(&owned);
    }
    if (bypass && bypass != none) {
        always(py->method, SHARED(EXIT), exit, 4);
        py->drop(bypass);
    }
    always(py->call, PART(RELEASE), 0, 0);
    if (failed) return 0;
    py->hold(none);
    return none;
}
