// Draws the figures of a report with uPlot. All numbers are in the page itself, in #data; the tables need no script.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (v) =>
    v == null ? "–" : Math.abs(v) >= 1e6 ? +(v / 1e6).toPrecision(3) + "M"
      : Math.abs(v) >= 1e4 ? +(v / 1e3).toPrecision(3) + "k" : String(+v.toPrecision(3));
  const plots = [];

  // A curve is {label, color, dash, x, y, ci}; those of one figure may have different x.
  const joined = (curves) => {
    const tables = [], series = [{ label: "" }], bands = [];
    for (const curve of curves) {
      const color = css("--c" + (curve.color % 6));
      tables.push([curve.x, curve.y]);
      series.push({
        label: curve.label, stroke: color, width: 2, dash: curve.dash ? [6, 4] : undefined, spanGaps: true,
        points: { show: curve.x.length < 30, size: 6, fill: color, stroke: color }, value: (_, v) => short(v),
      });
      if (curve.ci && curve.ci.some((half) => half > 0)) {
        tables.push([curve.x, curve.y.map((v, i) => v + curve.ci[i])]);
        tables.push([curve.x, curve.y.map((v, i) => Math.max(0, v - curve.ci[i]))]);
        const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...edge, label: "+" }, { ...edge, label: "−" });
        bands.push({ series: [series.length - 2, series.length - 1], fill: color + "2e" });
      }
    }
    return { data: uPlot.join(tables), series, bands };
  };

  // Objectives, as vertical lines with their value.
  const marks = (lines) => ({
    hooks: {
      draw: (plot) => {
        const { ctx, bbox } = plot;
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = css("--soft");
        ctx.setLineDash([4, 4]);
        ctx.textAlign = "left";
        ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
        for (const { at, label } of lines) {
          const x = plot.valToPos(at, "x", true);
          if (x < bbox.left || x > bbox.left + bbox.width) continue;
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          ctx.fillText(label, x + 4 * devicePixelRatio, bbox.top + 12 * devicePixelRatio);
        }
        ctx.restore();
      },
    },
  });

  const axis = (label, size) => ({
    label, size, labelSize: 18, labelFont: "12px system-ui, sans-serif", font: "12px system-ui, sans-serif",
    stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 },
    values: (_, ticks) => ticks.map((v) => (v == null ? "" : short(v))),
  });

  const draw = (place, figure) => {
    place.replaceChildren();
    const { data, series, bands } = joined(figure.curves);
    const hidden = new Set(series.flatMap((one, i) => (one.label === "+" || one.label === "−" ? [i] : [])));
    const options = {
      width: place.clientWidth, height: 230, series, bands,
      scales: {
        x: { time: false, distr: figure.logX ? 3 : 1 },
        y: { range: figure.percent ? [0, 1.02] : (_, __, max) => [0, max > 0 ? max * 1.05 : 1] },
      },
      axes: [axis(figure.x, 32), axis(figure.y, 50)],
      legend: { live: true, markers: { dash: (_, i) => (series[i].dash ? "dashed" : "solid") } },
      cursor: { drag: { x: true, y: false } },
      plugins: figure.lines ? [marks(figure.lines)] : [],
    };
    options.series[0].label = figure.x;
    options.series[0].value = (_, v) => short(v);
    const plot = new uPlot(options, data, place);
    // Edges of confidence bands are no curves of their own in the legend.
    plot.root.querySelectorAll(".u-legend .u-series").forEach((row, i) => { if (hidden.has(i)) row.style.display = "none"; });
    plots.push({ plot, place });
  };

  const all = () => {
    plots.splice(0).forEach(({ plot }) => plot.destroy());
    const chosen = document.getElementById("load");
    for (const place of document.querySelectorAll("[data-figure]")) {
      let figure = figures[place.dataset.figure];
      if (figure.byLoad) figure = figure.byLoad[chosen ? chosen.value : Object.keys(figure.byLoad)[0]];
      if (figure && figure.curves.length) draw(place, figure);
      else place.textContent = "not measured at this load";
    }
  };

  all();
  document.getElementById("load")?.addEventListener("change", all);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    plots.forEach(({ plot, place }) => plot.setSize({ width: place.clientWidth, height: 230 }));
  });
})();
