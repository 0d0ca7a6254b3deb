// The connect page: copies an example, and shows the examples for another model.

import { component, copy } from "./core.js";

component("connect", () => ({
  take(event) {
    return copy(document.getElementById(event.currentTarget.dataset.copy).textContent);
  },
  choose(event) {
    event.target.form.submit();
  },
}));
