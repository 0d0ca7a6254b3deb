// What a person would see is wrong: read by the sweeps. Each function answers a list of sentences.
(() => {
  const visible = (node) => {
    const { width, height } = node.getBoundingClientRect();
    return width > 1 && height > 1 && node.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  };
  const told = (node) => {
    const name = [node.localName, node.id && `#${node.id}`, ...[...node.classList].map((each) => `.${each}`)].join("");
    return `${name} "${(node.textContent || node.value || "").trim().replace(/\s+/g, " ").slice(0, 60)}"`;
  };
  const forReaders = (node) => node.closest(".hidden, [aria-hidden=true], .skip, .stack thead, .toasts") !== null;
  const scrolls = (node) => {
    for (let each = node.parentElement; each && each !== document.body; each = each.parentElement) {
      if (["auto", "scroll"].includes(getComputedStyle(each).overflowX)) return true;
    }
    return false;
  };
  const all = (selector = "body *") => [...document.querySelectorAll(selector)].filter((each) => visible(each) && !forReaders(each));

  globalThis.layout = {
    scrollsSideways() {
      const { scrollWidth, clientWidth } = document.scrollingElement;
      return scrollWidth > clientWidth ? [`the page is ${scrollWidth} wide in a window of ${clientWidth}`] : [];
    },
    outside() {
      const width = document.documentElement.clientWidth;
      return all().filter((each) => {
        const box = each.getBoundingClientRect();
        const isFixed = getComputedStyle(each).position === "fixed" || each.closest(".drawer, .skip");
        return (box.right > width + 1 || box.left < -1) && !isFixed && !scrolls(each);
      }).map((each) => `out of the window: ${told(each)}`);
    },
    clipped() {
      return all().filter((each) => {
        const style = getComputedStyle(each);
        const isCut = ["hidden", "clip"].includes(style.overflowX) && each.scrollWidth > each.clientWidth + 1;
        const isLow = ["hidden", "clip"].includes(style.overflowY) && each.scrollHeight > each.clientHeight + 2;
        return (isCut || isLow) && each.innerText?.trim() && !each.title && !each.closest(".u-wrap, [role=img]");
      }).map((each) => `cut off: ${told(each)} (${each.scrollWidth} in ${each.clientWidth}, ${each.scrollHeight} in ${each.clientHeight})`);
    },
    overflowing() {
      return all("button, .button, .badge, a, label, h1, h2, h3, dd, dt, th, td, legend, summary, option").filter((each) => {
        const style = getComputedStyle(each);
        return style.display !== "inline" && style.overflowX === "visible" && each.scrollWidth > each.clientWidth + 1 && !scrolls(each);
      }).map((each) => `text runs out of ${told(each)} (${each.scrollWidth} in ${each.clientWidth})`);
    },
    smallTargets(least) {
      return all("a[href], button, select, textarea, input, summary").filter((each) => {
        const isInText = each.localName === "a" && getComputedStyle(each).display === "inline";
        const isBox = ["checkbox", "radio"].includes(each.type);
        const target = (isBox && each.closest("label")) || each;
        const { width, height } = target.getBoundingClientRect();
        return !isInText && Math.min(width, height) < least - 0.5;
      }).map((each) => {
        const { width, height } = each.getBoundingClientRect();
        return `${Math.round(width)} × ${Math.round(height)}: ${told(each)}`;
      });
    },
    texts() {
      const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      const found = [document.title];
      for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const parent = node.parentElement;
        if (!node.data.trim() || parent.closest("body [lang], script, style, template, code, pre, bdi, svg, noscript, [data-role], .u-wrap")) continue;
        if (parent.checkVisibility() || parent.closest(".hidden")) found.push(node.data.trim());
      }
      for (const each of document.querySelectorAll("body [aria-label], body [title], body [placeholder], body [alt]")) {
        if (!each.checkVisibility() || each.closest("body [lang]")) continue;
        for (const name of ["aria-label", "title", "placeholder", "alt"]) {
          if (each.getAttribute(name)?.trim()) found.push(each.getAttribute(name).trim());
        }
      }
      return [...new Set(found)];
    },
  };
})();
