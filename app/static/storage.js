// Values that this browser stores for the app. If its storage is full or disabled, the page keeps them in memory.

function storage(open) {
  const held = new Map();
  const attempt = (use, otherwise) => {
    try {
      return use(open());
    } catch {
      return otherwise;
    }
  };
  return {
    read: (name) => held.get(name) ?? attempt((area) => area.getItem(name), null),
    write(name, text) {
      held.delete(name);
      if (attempt((area) => area.setItem(name, text) ?? true, false)) return;
      held.set(name, text);
    },
    remove(name) {
      held.delete(name);
      attempt((area) => area.removeItem(name));
    },
    names: () => [...new Set([...attempt(Object.keys, []), ...held.keys()])],
  };
}

export const browser = storage(() => localStorage);
export const tab = storage(() => sessionStorage);
