"use strict";
(() => {
  const all = (query) => [...document.querySelectorAll(query)];

  // Charts. The description of each is drawn when it is first visible, and the others while the
  // browser is idle, so that all of them are printed.
  const drawn = new Set();
  const points = ({ fields, rows, ...shared }) =>
    rows.map((row) => ({ ...shared, ...Object.fromEntries(fields.map((field, index) => [field, row[index]])) }));
  const draw = (plot) => {
    if (drawn.has(plot)) return;
    drawn.add(plot);
    const spec = JSON.parse(plot.firstElementChild.textContent);
    for (const [name, tables] of Object.entries(spec.datasets ?? {})) spec.datasets[name] = tables.flatMap(points);
    // Expressions are interpreted, because the page's policy forbids code made from text.
    const options = { ast: true, renderer: "svg", actions: false, defaultStyle: false, tooltip: { disableDefaultStyle: true } };
    vegaEmbed(plot, spec, options);
  };
  const plots = all(".plot");
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, { rootMargin: "300px" });
  for (const plot of plots) {
    // The space of the axes' plot area, so that the page hardly moves when the chart is drawn.
    plot.style.minHeight = `${plot.dataset.height}px`;
    observer.observe(plot);
  }
  addEventListener("beforeprint", () => plots.forEach(draw));

  // Tabs. Without this script every section is shown, one under the other.
  const tabs = all(".tabs a");
  const show = (name) => {
    const known = tabs.some((tab) => tab.hash === name) ? name : tabs[0].hash;
    for (const tab of tabs) {
      const chosen = tab.hash === known;
      tab.setAttribute("aria-selected", String(chosen));
      document.querySelector(tab.hash).hidden = !chosen;
    }
  };
  if (tabs.length > 0) {
    for (const tab of tabs) {
      tab.addEventListener("click", (event) => {
        event.preventDefault();
        history.replaceState(null, "", tab.hash);
        show(tab.hash);
      });
    }
    addEventListener("hashchange", () => show(location.hash));
    show(location.hash);
  }

  // Light, dark, or as the system has it.
  const button = document.querySelector("#theme");
  const themes = ["system", "light", "dark"];
  let theme = 0;
  const paint = () => {
    if (theme === 0) {
      delete document.documentElement.dataset.theme;
    } else {
      document.documentElement.dataset.theme = themes[theme];
    }
    button.textContent = `colours: ${themes[theme]}`;
  };
  if (button !== null) {
    button.hidden = false;
    button.addEventListener("click", () => {
      theme = (theme + 1) % themes.length;
      paint();
    });
    paint();
  }

  // Filters over the traces.
  const traces = all("details.trace");
  const choices = all("select[data-filter]");
  const search = document.querySelector("input[data-search]");
  const count = document.querySelector("output[data-count]");
  const filter = () => {
    const words = search.value.toLowerCase();
    let left = 0;
    for (const trace of traces) {
      const fits =
        choices.every((choice) => choice.value === "" || trace.dataset[choice.dataset.filter] === choice.value) &&
        (words === "" || trace.textContent.toLowerCase().includes(words));
      trace.hidden = !fits;
      left += fits ? 1 : 0;
    }
    count.textContent = left === traces.length ? `${left} traces` : `${left} of ${traces.length} traces`;
  };
  if (search !== null) {
    search.form.addEventListener("submit", (event) => event.preventDefault());
    search.form.addEventListener("input", filter);
    search.form.addEventListener("change", filter);
    filter();
  }
})();
