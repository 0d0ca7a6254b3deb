// Checks for tests that visit every page. Each returns the layout problems that it finds; `texts`, the page's texts.
(() => {
  const visible = (node) => {
    const { width, height } = node.getBoundingClientRect();
    return width > 1 && height > 1 && node.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  };
  const describe = (node) => {
    const classes = [...node.classList].map((className) => `.${className}`);
    const name = [node.localName, node.id && `#${node.id}`, ...classes].join("");
    return `${name} "${(node.textContent || node.value || "").trim().replace(/\s+/g, " ").slice(0, 60)}"`;
  };
  const forReaders = (node) => node.closest(".hidden, [aria-hidden=true], .skip, .stack thead, .toasts") !== null;
  const scrolls = (node) => {
    for (let ancestor = node.parentElement; ancestor && ancestor !== document.body; ancestor = ancestor.parentElement) {
      if (["auto", "scroll"].includes(getComputedStyle(ancestor).overflowX)) return true;
    }
    return false;
  };
  const all = (selector = "body *") => [...document.querySelectorAll(selector)].filter((node) => visible(node) && !forReaders(node));

  globalThis.layout = {
    scrollsSideways() {
      const { scrollWidth, clientWidth } = document.scrollingElement;
      return scrollWidth > clientWidth ? [`the page is ${scrollWidth} wide in a window of ${clientWidth}`] : [];
    },
    outside() {
      const width = document.documentElement.clientWidth;
      return all().filter((node) => {
        const box = node.getBoundingClientRect();
        const isFixed = getComputedStyle(node).position === "fixed" || node.closest(".drawer, .skip");
        return (box.right > width + 1 || box.left < -1) && !isFixed && !scrolls(node);
      }).map((node) => `out of the window: ${describe(node)}`);
    },
    clipped() {
      return all().filter((node) => {
        const style = getComputedStyle(node);
        const isCut = ["hidden", "clip"].includes(style.overflowX) && node.scrollWidth > node.clientWidth + 1;
        const isLow = ["hidden", "clip"].includes(style.overflowY) && node.scrollHeight > node.clientHeight + 2;
        return (isCut || isLow) && node.innerText?.trim() && !node.title && !node.closest(".u-wrap, [role=img]");
      }).map((node) => {
        const { scrollWidth, clientWidth, scrollHeight, clientHeight } = node;
        return `cut off: ${describe(node)} (${scrollWidth} in ${clientWidth}, ${scrollHeight} in ${clientHeight})`;
      });
    },
    overflowing() {
      return all("button, .button, .badge, a, label, h1, h2, h3, dd, dt, th, td, legend, summary, option").filter((node) => {
        const style = getComputedStyle(node);
        return style.display !== "inline" && style.overflowX === "visible" && node.scrollWidth > node.clientWidth + 1 && !scrolls(node);
      }).map((node) => `text runs out of ${describe(node)} (${node.scrollWidth} in ${node.clientWidth})`);
    },
    smallTargets(least) {
      return all("a[href], button, select, textarea, input, summary").filter((node) => {
        const isInText = node.localName === "a" && getComputedStyle(node).display === "inline";
        const isBox = ["checkbox", "radio"].includes(node.type);
        const target = (isBox && node.closest("label")) || node;
        const { width, height } = target.getBoundingClientRect();
        return !isInText && Math.min(width, height) < least - 0.5;
      }).map((node) => {
        const { width, height } = node.getBoundingClientRect();
        return `${Math.round(width)} × ${Math.round(height)}: ${describe(node)}`;
      });
    },
    texts() {
      const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      const texts = [document.title];
      for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const parent = node.parentElement;
        if (!node.data.trim() || parent.closest("body [lang], script, style, template, code, pre, bdi, svg, noscript, [data-role], .u-wrap")) continue;
        if (parent.checkVisibility() || parent.closest(".hidden")) texts.push(node.data.trim());
      }
      for (const node of document.querySelectorAll("body [aria-label], body [title], body [placeholder], body [alt]")) {
        if (!node.checkVisibility() || node.closest("body [lang]")) continue;
        for (const name of ["aria-label", "title", "placeholder", "alt"]) {
          if (node.getAttribute(name)?.trim()) texts.push(node.getAttribute(name).trim());
        }
      }
      return [...new Set(texts)];
    },
  };
})();
